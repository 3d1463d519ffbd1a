"""SMoE, figure 4: what each rank of the chosen experts is worth to the output.

One rank at a time is left out, or gives way to the best expert that was not chosen, in
every layer of every decode step; the weights keep their sum. SMoE rests on two things:
that the first ranks matter more than the last ones, and that a last one is worth little
more than an inactive expert in its place.
"""

import dataclasses
from typing import Any

import numpy as np

from moe_edge.bench.cases import workload_of
from moe_edge.bench.engines import Bench
from moe_edge.bench.offloading import studied
from moe_edge.bench.prompts import PromptSettings, check_inputs, make_pool
from moe_edge.bench.settings import Steps
from moe_edge.bench.study import Study
from moe_edge.core.checks import ConfigError
from moe_edge.engine.layered import LayeredEngine
from moe_edge.evaluate.agreement import compare
from moe_edge.evaluate.likelihood import Forced
from moe_edge.evaluate.stepwise import score_batches
from moe_edge.metrics.frames import Rows, Tables, frame, interval
from moe_edge.model.config import MoeConfig
from moe_edge.papers.smoe.studies.fig6 import record_scores
from moe_edge.route.base import Route, gate_scores, rescale

LEFT_OUT, REPLACED = "left out", "replaced by the best not chosen"
APART = "left out, the first rank costs more than the last (intervals apart)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankSettings(PromptSettings):
    """`PromptSettings` names the rest; every round is a text whose last `new_tokens`
    are scored.

    Attributes:
      batch_size: texts that decode together.
      scored_texts: generations whose scores are averaged by rank.
    """

    rounds: int = 144
    prompt_tokens: int = 16
    new_tokens: Steps = 64
    batch_size: int = 16
    scored_texts: int = 12


@dataclasses.dataclass(frozen=True)
class OneRank(Route):
    """One rank of every token's choice is left out, or replaced by the best of the
    others with its own score; the weights keep their sum."""

    rank: int
    replaces: bool

    name = "one_rank"
    SOURCE = "SMoE, section III and fig. 4: importance of active experts by score"
    lossless = False

    def route(
        self, layer, scores_TE, resident_E, params: MoeConfig, ids_TK, weights_TK
    ):
        E, rank = scores_TE.shape[1], self.rank
        scores_TE = gate_scores(scores_TE, params)
        chosen_TE = (ids_TK[:, :, None] == np.arange(E)).any(axis=1)
        real_T1 = ids_TK[:, rank : rank + 1] < E
        total_T1 = weights_TK.sum(axis=1, keepdims=True)
        new_id_T1, new_weight_T1 = np.full_like(real_T1, E, np.int32), 0.0
        if self.replaces:
            rest_TE = np.where(chosen_TE, -1, scores_TE)
            new_id_T1 = rest_TE.argmax(axis=1, keepdims=True).astype(np.int32)
            # The weights of a token are its scores times one factor.
            own_T1 = np.where(chosen_TE, scores_TE, 0).sum(axis=1, keepdims=True)
            factor_T1 = total_T1 / np.maximum(own_T1, np.finfo(np.float32).tiny)
            new_weight_T1 = rest_TE.max(axis=1, keepdims=True) * factor_T1
        at_rank_1K = np.arange(ids_TK.shape[1])[None] == rank
        new_TK = np.where(at_rank_1K & real_T1, new_id_T1, ids_TK)
        new_weights_TK = np.where(at_rank_1K & real_T1, new_weight_T1, weights_TK)
        left_T1 = new_weights_TK.sum(axis=1, keepdims=True) > 0
        return new_TK, rescale(new_weights_TK, total_T1, real_T1 & left_T1)


def measure(settings: RankSettings, rows: Rows) -> None:
    """Scores the texts with every rank changed.

    Raises:
      ConfigError: a model with one chosen expert, or with all.
    """
    with Bench(settings.checkpoint) as bench:
        moe = bench.config.moe
        if not 1 < moe.top_k < moe.num_experts:
            raise ConfigError(
                f"the model chooses {moe.top_k} of {moe.num_experts} experts, expected "
                "two or more, and not all: ranks are compared"
            )
        length = settings.prompt_tokens + settings.new_tokens
        pool = make_pool(settings, bench.tokenizer, settings.rounds, length)
        texts = [Forced(ids, settings.prompt_tokens) for ids in pool.rows]
        reference = score_batches(bench.resident, texts, settings.batch_size)
        whole = bench.engine(studied(device_memory="100%"), settings.batch_size)
        runs = {}
        for rank in range(moe.top_k):
            for kind in (LEFT_OUT, REPLACED):
                route = OneRank(rank, kind == REPLACED)
                given = {"route": route, "programs": whole.programs}
                engine = LayeredEngine(bench.weights, whole.layer_step, **given)
                scored = score_batches(engine, texts, settings.batch_size)
                one = runs[kind, rank] = compare(scored, reference)
                ratio = interval(one.perplexity_ratio, one.ratio_interval95, one.tokens)
                at = kind, rank + 1
                rows("changed", *at, perplexity_ratio=ratio, agreement=one.agreement)
        shares = []
        for row in pool.rows[: settings.scored_texts]:
            scores_NLE = record_scores(bench, row, settings.new_tokens)
            shares.append(-np.sort(-scores_NLE, axis=-1).mean(axis=(0, 1)))
        for rank, share in enumerate(np.mean(shares, axis=0)[: 2 * moe.top_k]):
            kind = "chosen" if rank < moe.top_k else "not chosen"
            rows("scores", kind, rank + 1, score=share)
        first, last = (runs[LEFT_OUT, rank] for rank in (0, moe.top_k - 1))
        rows.checks[APART] = first.ratio_interval95[0] > last.ratio_interval95[1]
        rows.about |= {"model": bench.model, "workload": workload_of(settings, pool)}
    rows.about["baselines"] = ["the model's own choice"]


def derive(tables: Tables) -> dict[str, Any]:
    """What changing a rank costs in perplexity."""
    changed = tables["changed"]
    changed["lost"] = changed.perplexity_ratio - 1
    changed["lost_percent"] = 100 * changed.lost
    return {"lost": changed, "top_k": changed["rank"].max()}


FRAMES = {
    "scores": frame("kind rank", "score"),
    "changed": frame("kind rank", "perplexity_ratio agreement"),
}
STUDY = Study("smoe_fig4", RankSettings, measure, FRAMES, derive, check=check_inputs)

"""SMoE, figure 4: what each rank of the chosen experts is worth to the output.

One rank at a time is left out, or gives way to the best expert that was not chosen, in
every layer of every decode step; the weights keep their sum. SMoE rests on two things:
that the first ranks matter more than the last ones, and that a last one is worth little
more than an inactive expert in its place.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from moe_edge.bench.cases import LIMITS, workload_of
from moe_edge.bench.engines import Bench
from moe_edge.bench.offloading import studied
from moe_edge.bench.prompts import PromptPool, PromptSettings, check_inputs, make_pool
from moe_edge.bench.study import Claim, Findings, Study
from moe_edge.core.checks import ConfigError
from moe_edge.engine.layered import LayeredEngine
from moe_edge.evaluate.agreement import Agreement, compare
from moe_edge.evaluate.likelihood import Forced
from moe_edge.evaluate.stepwise import score_batches
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.metrics.results import interval_metric, metric
from moe_edge.model.config import MoeConfig
from moe_edge.papers.smoe.studies.fig6 import record_scores
from moe_edge.route.base import Route, gate_scores, rescale

LEFT_OUT, REPLACED = "left out", "replaced by the best not chosen"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankSettings(PromptSettings):
    """`PromptSettings` names the rest; every round is a text whose last `new_tokens`
    are scored.

    Attributes:
      batch_size: texts that decode together.
      scored_texts: generations whose scores are averaged by rank.
    """

    rounds: int = 96
    prompt_tokens: int = 16
    new_tokens: int = 64
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


class Ranks(NamedTuple):
    """What was measured: scores by rank, and runs by (kind, rank)."""

    score_R: np.ndarray  # mean share of a token's scores, of the first 2 K ranks
    runs: Mapping[tuple[str, int], Agreement]


def run(settings: RankSettings) -> Findings:
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
        for rank in range(bench.config.moe.top_k):
            for kind in (LEFT_OUT, REPLACED):
                route = OneRank(rank, kind == REPLACED)
                given = {"route": route, "programs": whole.programs}
                engine = LayeredEngine(bench.weights, whole.layer_step, **given)
                scored = score_batches(engine, texts, settings.batch_size)
                runs[kind, rank] = compare(scored, reference)
        shares = []
        for row in pool.rows[: settings.scored_texts]:
            scores_NLE = record_scores(bench, row, settings.new_tokens)
            shares.append(-np.sort(-scores_NLE, axis=-1).mean(axis=(0, 1)))
        score_R = np.mean(shares, axis=0)[: 2 * bench.config.moe.top_k]
        return findings(bench.model, Ranks(score_R, runs), pool, settings)


def findings(
    model: dict, found: Ranks, pool: PromptPool, settings: RankSettings
) -> Findings:
    """The entry from what was measured."""
    rows, K = [], 1 + max(rank for _, rank in found.runs)
    for rank, share in enumerate(found.score_R):
        name = f"mean score, rank {rank + 1}"
        rows.append(metric("chosen" if rank < K else "not chosen", name, share, "1"))
    for (kind, rank), one in found.runs.items():
        value, interval = one.perplexity_ratio, one.ratio_interval95
        name = f"perplexity ratio, rank {rank + 1}"
        rows.append(interval_metric(kind, name, value, interval, one.tokens))
        rows.append(metric(kind, f"agreement, rank {rank + 1}", one.agreement, "1"))
    lost = {key: 100 * (one.perplexity_ratio - 1) for key, one in found.runs.items()}
    first, last = (lost[LEFT_OUT, rank] for rank in (0, K - 1))
    swapped = lost[REPLACED, K - 1]
    return Findings(
        answer=f"Leaving out the expert of rank 1 costs {first:.1f} % of perplexity, "
        f"that of rank {K} {last:.1f} %; with the best expert not chosen in its place "
        f"{swapped:.1f} %.",
        model=model,
        workload=workload_of(settings, pool),
        metrics=rows,
        limits=[
            LIMITS[0],
            "Prompts are computed as the model chose; only decode steps are changed.",
        ],
        kind="measured",
        baselines=["the model's own choice"],
        checks={
            "left out, the first rank costs more than the last (intervals apart)": (
                found.runs[LEFT_OUT, 0].ratio_interval95[0]
                > found.runs[LEFT_OUT, K - 1].ratio_interval95[1]
            )
        },
        ours={
            f"{kind}, rank {rank + 1}": value for (kind, rank), value in lost.items()
        },
        plot=lambda path: plot(path, found, K),
        summary={"perplexity_lost_percent": [first, last, swapped]},
    )


def plot(path, found: Ranks, top_k: int) -> None:
    """Scores by rank; perplexity by the rank that was changed."""
    ranks = list(range(1, len(found.score_R) + 1))
    is_chosen_R = np.arange(len(ranks)) < top_k
    scores = {
        "chosen": np.where(is_chosen_R, found.score_R, np.nan),
        "not chosen": np.where(is_chosen_R, np.nan, found.score_R),
    }
    series, spreads = {}, {}
    for kind in (LEFT_OUT, REPLACED):
        of = [found.runs[kind, rank] for rank in range(top_k)]
        ratio_R = np.array([one.perplexity_ratio for one in of])
        low_R, high_R = np.array([one.ratio_interval95 for one in of]).T
        series[kind] = ratio_R
        spreads[kind] = np.maximum([ratio_R - low_R, high_R - ratio_R], 0)
    draw_panels(
        path,
        [
            Panel(
                "scores",
                "mean score",
                ranks,
                scores,
                x_label="rank",
            ),
            Panel(
                "one rank changed (bars: 95 % interval)",
                "perplexity over the model's",
                ranks[:top_k],
                series,
                spreads,
                x_label="rank",
                level=("the model", 1.0),
            ),
        ],
        title="What each rank of the chosen experts is worth",
    )


STUDY = Study(
    name="smoe_fig4",
    question="What is each rank of the chosen experts worth (SMoE fig. 4)?",
    settings=RankSettings,
    measure=run,
    check=check_inputs,
    claim=Claim(
        source="SMoE, section III and fig. 4",
        paper={
            "trend": "a few high-scoring active experts greatly impact accuracy, "
            "low-scoring ones resemble inactive experts"
        },
        why="The paper shows a picture without numbers and without saying what was "
        "changed; here it is stated, and measured as perplexity of forced text.",
    ),
)

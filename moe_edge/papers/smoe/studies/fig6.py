"""SMoE, figure 6: how likely an expert is needed again soon, by its score's rank."""

import dataclasses
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from moe_edge.bench.cases import workload_of
from moe_edge.bench.engines import Bench
from moe_edge.bench.prompts import PromptSettings, check_inputs, make_pool
from moe_edge.bench.settings import Margin, Steps
from moe_edge.bench.study import Study
from moe_edge.engine.generate import generate
from moe_edge.metrics.frames import Rows, Tables, frame, ranging
from moe_edge.route.base import gate_scores

AHEAD = 3  # iterations
KINDS = ("top-k", "top-k or alternative")
CHOSEN, NEXT, LOWEST = "chosen (top-k)", "the next k", "the lowest quarter"
OF_SEQUENCES = "range of sequences"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReuseSettings(PromptSettings):
    """`PromptSettings` names the rest; every round is one sequence.

    Attributes:
      a: SMoE's margin, which makes an expert an alternative.
    """

    rounds: int = 12
    prompt_tokens: int = 48
    new_tokens: Steps = 64
    a: Margin = 0.2


def needed(
    scores_NLE: np.ndarray, top_k: int, a: float
) -> tuple[np.ndarray, np.ndarray]:
    """Masks [N, L, E]: chosen (top-k); chosen or an alternative of a low-score one.

    Alternatives score above (1 - a) times the best score that was not chosen.
    """
    order_NLE = np.argsort(-scores_NLE, axis=-1, kind="stable")
    ranked_NLE = np.take_along_axis(scores_NLE, order_NLE, axis=-1)
    next_NL1 = ranked_NLE[..., min(top_k, ranked_NLE.shape[-1] - 1)][..., None]
    rank_NLE = np.argsort(order_NLE, axis=-1, kind="stable")
    chosen_NLE = rank_NLE < top_k
    return chosen_NLE, chosen_NLE | (scores_NLE > (1 - a) * next_NL1)


def reuse_by_rank(
    scores_NLE: np.ndarray, needed_NLE: np.ndarray, ahead: int = AHEAD
) -> np.ndarray:
    """Share of (token, layer) whose expert of rank r is needed within `ahead` tokens.

    Args:
      scores_NLE: of N consecutive tokens of one sequence.
      needed_NLE: see `needed`.
      ahead: tokens looked at after each one.
    Returns:
      float64 [L, E] by rank, best first; the last `ahead` tokens are not counted.
    """
    N = len(scores_NLE) - ahead
    soon_NLE = np.zeros((N, *scores_NLE.shape[1:]), bool)
    for later in range(1, ahead + 1):
        soon_NLE |= needed_NLE[later : later + N]
    order_NLE = np.argsort(-scores_NLE[:N], axis=-1, kind="stable")
    return np.take_along_axis(soon_NLE, order_NLE, axis=-1).mean(axis=0)


def record_scores(bench: Bench, prompt, new_tokens: int) -> np.ndarray:
    """float32 [N, L, E]: gate scores of every decode step of one generation."""
    found: list[np.ndarray] = []

    def note(layer, routing):
        if routing.scores_TE.shape[0] == 1:  # a decode step
            scores_TE = np.asarray(routing.scores_TE)
            found.append(gate_scores(scores_TE, bench.config.moe))

    generate(bench.resident, [prompt], new_tokens, on_routing=note)
    layers, E = len(bench.config.moe_layers), bench.config.moe.num_experts
    return np.concatenate(found).reshape(-1, layers, E)


def measure(settings: ReuseSettings, rows: Rows) -> None:
    """Records sequences with all scores."""
    with Bench(settings.checkpoint) as bench:
        pool = make_pool(
            settings, bench.tokenizer, settings.rounds, settings.prompt_tokens
        )
        moe, found = bench.config.moe, []
        for prompt in pool.rows:
            scores_NLE = record_scores(bench, prompt, settings.new_tokens)
            masks = needed(scores_NLE, moe.top_k, settings.a)
            found.append([reuse_by_rank(scores_NLE, mask_NLE) for mask_NLE in masks])
        rows.about |= {"model": bench.model, "workload": workload_of(settings, pool)}
    for kind, reuse_QLE in zip(KINDS, np.stack(found, axis=1), strict=True):
        correlation = rank_correlation(reuse_QLE.mean(axis=(0, 1)))
        chance = 1 - (1 - moe.top_k / moe.num_experts) ** AHEAD
        rows("kinds", kind, correlation=correlation, uniform=chance)
        for group, part in groups_of(moe.num_experts, moe.top_k).items():
            value_Q = reuse_QLE[:, :, part].mean(axis=(1, 2))
            reuse = ranging(value_Q.mean(), value_Q, OF_SEQUENCES)
            rows("groups", kind, group, reuse=reuse)
        by_layer = zip(bench.config.moe_layers, reuse_QLE.mean(axis=0), strict=True)
        for layer, reuse_E in by_layer:
            for rank, value in enumerate(reuse_E.round(4), 1):
                rows("ranks", kind, layer, rank, reuse=value)
    rows.about["baselines"] = ["uniform choice"]


def groups_of(E: int, K: int) -> dict[str, slice]:
    """Ranks of the groups that there are."""
    found = {
        CHOSEN: slice(0, K),
        NEXT: slice(K, min(2 * K, E)),
        LOWEST: slice(E - max(1, E // 4), E),
    }
    return {group: part for group, part in found.items() if part.start < E}


def rank_correlation(values_E: np.ndarray) -> float:
    """Spearman's, of a value with its place; 0 where all values are equal."""
    if np.ptp(values_E) == 0:
        return 0.0
    return float(spearmanr(np.arange(len(values_E)), values_E).statistic)


def derive(tables: Tables) -> dict[str, Any]:
    """Reuse as top-k or alternative, by group."""
    groups, kinds = tables["groups"], tables["kinds"].set_index("kind")
    reuse = groups[groups.kind == KINDS[1]].set_index("group").reuse
    values = {"chosen": CHOSEN, "beyond": NEXT, "lowest": LOWEST}
    found = {name: reuse.get(group) for name, group in values.items()}
    ordered = found["chosen"] > (found["beyond"] or 0) > found["lowest"]
    return {
        **found,
        "correlation": kinds.correlation[KINDS[1]],
        "checks": {"chosen > the next k > the lowest quarter": bool(ordered)},
    }


FRAMES = {
    "kinds": frame("kind", "correlation uniform"),
    "groups": frame("kind group", "reuse"),
    "ranks": frame("kind layer rank", "reuse"),
}
STUDY = Study("smoe_fig6", ReuseSettings, measure, FRAMES, derive, check=check_inputs)

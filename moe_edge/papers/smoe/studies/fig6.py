"""SMoE, figure 6: how likely an expert is needed again soon, by its score's rank."""

import dataclasses
import json

import numpy as np
from scipy.stats import spearmanr

from moe_edge.bench.cases import LIMITS, workload_of
from moe_edge.bench.engines import Bench
from moe_edge.bench.prompts import PromptPool, PromptSettings, check_inputs, make_pool
from moe_edge.bench.study import Claim, Findings, Study
from moe_edge.engine.generate import generate
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.metrics.results import metric
from moe_edge.model.config import ModelConfig
from moe_edge.route.base import gate_scores

AHEAD = 3  # iterations
KINDS = ("top-k", "top-k or alternative")
KEYS = ("chosen", "chosen_or_alternative")  # of reuse.json


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReuseSettings(PromptSettings):
    """`PromptSettings` names the rest; every round is one sequence.

    Attributes:
      a: SMoE's margin, which makes an expert an alternative.
    """

    rounds: int = 12
    prompt_tokens: int = 48
    new_tokens: int = 64
    a: float = 0.2


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


def run(settings: ReuseSettings) -> Findings:
    """Records sequences with all scores."""
    with Bench(settings.checkpoint) as bench:
        pool = make_pool(
            settings, bench.tokenizer, settings.rounds, settings.prompt_tokens
        )
        found = []
        for prompt in pool.rows:
            scores_NLE = record_scores(bench, prompt, settings.new_tokens)
            masks = needed(scores_NLE, bench.config.moe.top_k, settings.a)
            found.append([reuse_by_rank(scores_NLE, mask_NLE) for mask_NLE in masks])
    reuse = dict(zip(KINDS, np.stack(found, axis=1), strict=True))
    return findings(bench, reuse, pool, settings)


def rank_correlation(values_E: np.ndarray) -> float:
    """Spearman's, of a value with its place; 0 where all values are equal."""
    if np.ptp(values_E) == 0:
        return 0.0
    return float(spearmanr(np.arange(len(values_E)), values_E).statistic)


def findings(
    bench: Bench,
    reuse: dict[str, np.ndarray],
    pool: PromptPool,
    settings: ReuseSettings,
) -> Findings:
    """The entry from the reuse curves [Q, L, E] of Q sequences, by KINDS."""
    moe = bench.config.moe
    E, K = moe.num_experts, moe.top_k
    groups = {
        "chosen (top-k)": slice(0, K),
        "the next k": slice(K, min(2 * K, E)),
        "the lowest quarter": slice(E - max(1, E // 4), E),
    }
    rows, found = [], {}
    for kind, reuse_QLE in reuse.items():
        for label, part in groups.items():
            if part.start >= E:
                continue
            value_Q = reuse_QLE[:, :, part].mean(axis=(1, 2))
            mean = found[kind, label] = float(value_Q.mean())
            spread = ("half range of sequences", float(np.ptp(value_Q)) / 2)
            name = f"needed again within {AHEAD} tokens as {kind}, {label}"
            rows.append(metric("score rank", name, mean, "1", len(value_Q), spread))
        correlation = rank_correlation(reuse_QLE.mean(axis=(0, 1)))
        rows.append(metric("score rank", f"rank correlation, {kind}", correlation, "1"))
        found[kind, "rank correlation"] = correlation
    top, beyond, low = (found[KINDS[1], label] for label in groups)
    curves = {
        key: reuse[kind].mean(axis=0).round(4).tolist()
        for key, kind in zip(KEYS, KINDS, strict=True)
    }
    stored = curves | {"layers": list(bench.config.moe_layers)}
    return Findings(
        answer=f"Needed again as top-k or alternative: {100 * top:.0f} % of the "
        f"chosen, {100 * beyond:.0f} % of the next {K}, {100 * low:.0f} % of the "
        "lowest quarter; rank correlation "
        f"{found[KINDS[1], 'rank correlation']:.2f}.",
        model=bench.model,
        workload=workload_of(settings, pool),
        metrics=rows,
        limits=[LIMITS[0], LIMITS[2]],
        baselines=["uniform choice"],
        checks={"chosen > the next k > the lowest quarter": top > beyond > low},
        ours={" / ".join(key): value for key, value in found.items()},
        plot=lambda path: plot(path, reuse, bench.config),
        summary={"reuse": {"chosen": top, "next_k": beyond, "lowest_quarter": low}},
        files={"reuse.json": json.dumps(stored) + "\n"},
    )


def plot(path, reuse: dict[str, np.ndarray], config: ModelConfig) -> None:
    """Reuse by rank, a line a layer; a panel a kind."""
    E, K = config.moe.num_experts, config.moe.top_k
    panels = []
    for kind, reuse_QLE in reuse.items():
        by_layer = zip(config.moe_layers, reuse_QLE.mean(axis=0), strict=True)
        panels.append(
            Panel(
                f"needed again as {kind}",
                f"share, within {AHEAD} tokens",
                list(range(1, E + 1)),
                {f"layer {n}": by_rank for n, by_rank in by_layer},
                x_label="rank of the score in the current token",
                level=("uniform choice", 1 - (1 - K / E) ** AHEAD),
            )
        )
    draw_panels(path, panels, title="Reuse of experts by the rank of their score")


STUDY = Study(
    name="smoe_fig6",
    question=f"Are experts of a high score needed again within {AHEAD} tokens, chosen "
    "or not (SMoE fig. 6)?",
    settings=ReuseSettings,
    measure=run,
    check=check_inputs,
    claim=Claim(
        source="SMoE, section IV-B and fig. 6",
        paper={"trend": "reuse falls with the rank of the score"},
        why="The paper shows a picture without numbers, of models with other routers; "
        "it says that higher-scored experts, inactive ones too, are more likely used "
        "again as top-k or alternative experts.",
    ),
)

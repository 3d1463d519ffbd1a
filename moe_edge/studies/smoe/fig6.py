"""SMoE, figure 6: how likely an expert is needed again soon, by its score's rank."""

import json

import numpy as np

from moe_edge.engine.generate import generate
from moe_edge.metrics.plots_panels import Panel, line_panels
from moe_edge.metrics.results import metric
from moe_edge.model.config import MoeConfig
from moe_edge.route.base import gate_scores
from moe_edge.studies.engines import Bench
from moe_edge.studies.prompts import PromptPool, make_pool
from moe_edge.studies.smoe.settings import LIMITS, Findings, Settings, claim

AHEAD = 3  # iterations
WHY = (
    "The paper shows a picture without numbers, of models with other routers; it says "
    "that higher-scored experts, inactive ones too, are more likely used again as "
    "top-k or alternative experts."
)


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


def run(settings: Settings) -> tuple[dict, Findings]:
    """Records sequences with all scores; returns the model and the findings."""
    with Bench(settings.checkpoint) as bench:
        pool = make_pool(
            settings, bench.tokenizer, settings.rounds, settings.prompt_tokens
        )
        moe, kinds = bench.config.moe, ([], [])
        for prompt in pool.rows:
            scores_NLE = record_scores(bench, prompt, settings.new_tokens)
            for kind, mask_NLE in zip(
                kinds, needed(scores_NLE, moe.top_k, settings.a), strict=True
            ):
                kind.append(reuse_by_rank(scores_NLE, mask_NLE))
    chosen_QLE, either_QLE = (np.stack(kind) for kind in kinds)
    return bench.model, findings(
        chosen_QLE, either_QLE, moe, bench.config.moe_layers, pool, settings
    )


def rank_correlation(values_E: np.ndarray) -> float:
    """Spearman's, of a value with its place; ties share their mean rank."""
    _, place_E, count_U = np.unique(values_E, return_inverse=True, return_counts=True)
    rank_E = (np.cumsum(count_U) - (count_U - 1) / 2)[place_E]
    if np.ptp(rank_E) == 0:
        return 0.0
    return float(np.corrcoef(np.arange(len(rank_E)), rank_E)[0, 1])


def findings(
    chosen_QLE: np.ndarray,
    either_QLE: np.ndarray,
    moe: MoeConfig,
    layers,
    pool: PromptPool,
    settings: Settings,
) -> Findings:
    """The entry from the reuse curves of Q sequences."""
    E, K = moe.num_experts, moe.top_k
    groups = {
        "chosen (top-k)": slice(0, K),
        "the next k": slice(K, min(2 * K, E)),
        "the lowest quarter": slice(E - max(1, E // 4), E),
    }
    rows, group_of = [], {}
    for kind, reuse_QLE in (
        ("top-k", chosen_QLE),
        ("top-k or alternative", either_QLE),
    ):
        for label, part in groups.items():
            if not E > part.start >= 0:
                continue
            value_Q = reuse_QLE[:, :, part].mean(axis=(1, 2))
            group_of[kind, label] = float(value_Q.mean())
            spread = ("half range of sequences", float(np.ptp(value_Q)) / 2)
            name = f"needed again within {AHEAD} tokens as {kind}, {label}"
            rows.append(
                metric("score rank", name, value_Q.mean(), "1", len(value_Q), spread)
            )
        mean_E = reuse_QLE.mean(axis=(0, 1))
        correlation = rank_correlation(mean_E)
        rows.append(metric("score rank", f"rank correlation, {kind}", correlation, "1"))
        group_of[kind, "rank correlation"] = correlation
    top, beyond, low = (
        group_of["top-k or alternative", label]
        for label in ("chosen (top-k)", "the next k", "the lowest quarter")
    )
    entry = {
        "question": f"Are experts of a high score needed again within {AHEAD} tokens, "
        "chosen or not (SMoE fig. 6)?",
        "answer": f"Needed again as top-k or alternative: {100 * top:.0f} % of the "
        f"chosen, {100 * beyond:.0f} % of the next {K}, {100 * low:.0f} % of the "
        "lowest quarter; rank correlation "
        f"{group_of['top-k or alternative', 'rank correlation']:.2f}.",
        "kind": "measured",
        "workload": {
            "prompts": list(pool.sources),
            "sequences": len(chosen_QLE),
            "prompt_tokens": settings.prompt_tokens,
            "new_tokens": settings.new_tokens,
            "a": settings.a,
        },
        "metrics": rows,
        "baselines": ["uniform choice"],
        "checks": {"chosen > the next k > the lowest quarter": top > beyond > low},
        "limits": [LIMITS[0], LIMITS[2], WHY],
        "paper_claim": claim(
            "SMoE, section IV-B and fig. 6",
            {"trend": "reuse falls with the rank of the score"},
            {" / ".join(key): value for key, value in group_of.items()},
            WHY,
        ),
    }
    curves = {
        "chosen": chosen_QLE.mean(axis=0).round(4).tolist(),
        "chosen_or_alternative": either_QLE.mean(axis=0).round(4).tolist(),
        "layers": list(layers),
    }

    def plot(path) -> None:
        uniform = ("uniform choice", 1 - (1 - K / E) ** AHEAD)
        panels = []
        for title, reuse_QLE in (
            ("needed again as top-k", chosen_QLE),
            ("as top-k or alternative", either_QLE),
        ):
            by_layer = reuse_QLE.mean(axis=0)
            series = {f"layer {n}": by_layer[i] for i, n in enumerate(layers)}
            panels.append(
                Panel(
                    title, f"share, within {AHEAD} tokens", list(range(1, E + 1)),
                    series, x_label="rank of the score in the current token",
                    level=uniform,
                )
            )  # fmt: skip
        line_panels(path, panels, title="Reuse of experts by the rank of their score")

    return Findings(
        entry=entry,
        plot=plot,
        summary={"reuse": {"chosen": top, "next_k": beyond, "lowest_quarter": low}},
        files={"reuse.json": json.dumps(curves) + "\n"},
    )

"""SMoE, figure 12: cache ratio of SMoE and of the field's cache policies.

Policies without a layer plan share one pool of slots over all layers; `equal` and
AdapMoE's plan give each layer slots of its own.
"""

import itertools

import numpy as np

from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.metrics.results import metric
from moe_edge.model.config import ModelConfig
from moe_edge.offload.slot_plan import static_hit_curves
from moe_edge.studies.cases import LIMITS
from moe_edge.studies.prompts import check_inputs
from moe_edge.studies.smoe import fig14
from moe_edge.studies.smoe.fig14 import BudgetSettings
from moe_edge.studies.study import Claim, Findings, Study
from moe_edge.studies.timed_cases import Timing

FULL = "smoe"
PAPER_GAIN = 0.65  # at least, over the best existing approach; section VI-B


def policies(
    a: float, counts_LE: np.ndarray, config: ModelConfig
) -> dict[str, OffloadOptions]:
    """Every policy of the figure, the complete SMoE last."""
    hit_curves = static_hit_curves(counts_LE[list(config.moe_layers)])
    plan = {"hit_curves": hit_curves, "top_k": config.moe.top_k}
    return {
        "lru": OffloadOptions(eviction="lru"),
        "lru, equal slots": OffloadOptions(eviction="lru", slot_plan="equal"),
        "lru, adapmoe_dp slots": OffloadOptions(
            eviction="lru", slot_plan="adapmoe_dp", slot_plan_options=plan
        ),
        "lfu": OffloadOptions(eviction="lfu"),
        "static_prompt": OffloadOptions(eviction="static_prompt"),
        "hybrimoe": OffloadOptions(eviction="hybrimoe"),
        "moe_infinity": OffloadOptions(
            eviction="moe_infinity", predictor="moe_infinity"
        ),
        FULL: fig14.smoe_steps(a)["+BA"],
    }


def run(settings: BudgetSettings) -> Findings:
    """Measures all policies."""
    return findings(*fig14.time_policies(settings, policies), settings)


def best_baseline(timing: Timing, names, budget: str, batch: int) -> tuple[str, float]:
    """The policy with the highest median cache ratio, and that ratio."""
    ratio_of = {n: timing[n, budget, batch].median("hit_ratio") for n in names}
    best = max(ratio_of, key=ratio_of.get)
    return best, ratio_of[best]


def findings(model: dict, timing: Timing, settings: BudgetSettings) -> Findings:
    """The entry from what was measured."""
    names = list(dict.fromkeys(policy for policy, _, _ in timing.timed))
    others = [name for name in names if name != FULL]
    rows, details, gains = timing.rows(), [], {}
    for batch, budget in itertools.product(settings.batches, settings.budgets):
        ratio = timing[FULL, budget, batch].median("hit_ratio")
        best, best_ratio = best_baseline(timing, others, budget, batch)
        at = f"{budget}, batch {batch}"
        details.append(f"{at}: {ratio:.2f} against {best_ratio:.2f} ({best}).")
        if best_ratio:
            gains[at] = ratio / best_ratio - 1
            name = f"cache ratio over the best baseline's, {at}"
            rows.append(metric(FULL, name, 1 + gains[at], "1", settings.rounds))
    low, high = (100 * end(gains.values(), default=0.0) for end in (min, max))
    return Findings(
        answer=f"SMoE's cache ratio is {low:+.0f} to {high:+.0f} % of the best "
        f"baseline's (the paper: at least +{100 * PAPER_GAIN:.0f} %).",
        details=details,
        model=model,
        workload=timing.ready.workload(settings),
        metrics=rows,
        limits=[
            *LIMITS,
            "SMoE's ratio counts what it computes after substitution, as the paper's "
            "does: part of its gain is paid in fidelity (rows of its own).",
        ],
        kind="emulated",
        baselines=[*others, "resident"],
        checks=timing.checks(),
        ours=gains,
        plot=lambda path: fig14.plot(path, timing, settings, names),
        summary={"cache_ratio_gain": gains},
    )


STUDY = Study(
    name="smoe_fig12",
    question="How much of what a step computes does each policy find on the device "
    "(SMoE fig. 12)?",
    settings=BudgetSettings,
    measure=run,
    check=check_inputs,
    claim=Claim(
        source="SMoE, section VI-B and fig. 12: gain in cache ratio over the best "
        "existing approach",
        paper={"at least": PAPER_GAIN},
        why="The paper's baselines are whole systems (llama.cpp, MoE-Infinity, "
        "HybriMoE); here each policy runs in one engine, so LRU and LFU, which the "
        "paper does not compare with, are baselines too, and the best of all is what "
        "SMoE is held against. A ratio can only gain as much as the baseline leaves to "
        "gain.",
    ),
)

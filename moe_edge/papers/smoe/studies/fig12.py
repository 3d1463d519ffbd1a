"""SMoE, figure 12: cache ratio of SMoE and of the field's cache policies.

Every policy runs with one pool of slots for all layers and with as many slots for each
layer; AdapMoE's plan gives each layer slots of its own. The better one counts, for SMoE
and for what it is held against. Of HybriMoE only the eviction runs, of AdapMoE only the
slots: the names say so.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np

from moe_edge.bench.cases import AHEAD_LIMIT, INLINE_LIMIT, LIMITS
from moe_edge.bench.offloading import studied
from moe_edge.bench.prompts import check_inputs
from moe_edge.bench.rounds import median_metric
from moe_edge.bench.study import Claim, Findings, Study, median_and_spread
from moe_edge.bench.timed_cases import Timing
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.model.config import ModelConfig
from moe_edge.offload.slot_plan import static_hit_curves
from moe_edge.papers.smoe.studies import fig14
from moe_edge.papers.smoe.studies.fig14 import BudgetSettings

FULL = "SMoE"
PAPER_GAIN = 0.65  # at least, over the best existing approach; section VI-B
PLANS = {"one pool": "one_pool", "equal slots": "equal"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fig12Settings(BudgetSettings):
    """The size of figure 12; `BudgetSettings` names the rest.

    Attributes:
      horizons: layers that MoE-Infinity looks ahead.
    """

    rounds: int = 5
    horizons: Sequence[int] = (1, 3)


def policies(
    a: float, counts_LE: np.ndarray, config: ModelConfig, horizons: Sequence[int] = (1,)
) -> dict[str, OffloadOptions]:
    """Every policy of the figure, with either plan; the complete SMoE last."""
    hit_curves = static_hit_curves(counts_LE[list(config.moe_layers)])
    plan = {"hit_curves": hit_curves, "top_k": config.moe.top_k}
    matrices = {"eviction": "moe_infinity", "predictor": "moe_infinity"}
    each = {
        "LRU": studied(eviction="lru"),
        "LFU": studied(eviction="lfu"),
        "successor (ours)": studied(eviction="successor"),
        "static, by the prompt": studied(eviction="static_prompt"),
        "HybriMoE, eviction only": studied(eviction="hybrimoe"),
        **{
            f"MoE-Infinity, {ahead} ahead": studied(**matrices, horizon=ahead)
            for ahead in horizons
        },
        FULL: fig14.smoe_steps(a)["+BA"],
    }
    named = {
        f"{name}, {told}": dataclasses.replace(options, slot_plan=plan_name)
        for name, options in each.items()
        for told, plan_name in PLANS.items()
    }
    slots_only = studied(eviction="lru", slot_plan="adapmoe_dp", slot_plan_options=plan)
    return {"LRU, AdapMoE's slots only": slots_only} | named


def run(settings: Fig12Settings) -> Findings:
    """Measures all policies."""
    named = functools.partial(policies, horizons=settings.horizons)
    return findings(*fig14.time_policies(settings, named), settings)


def best_of(timing: Timing, names, budget: str, batch: int) -> str:
    """The policy with the highest median cache ratio."""
    return max(names, key=lambda n: timing[n, budget, batch].median("hit_ratio"))


def findings(model: dict, timing: Timing, settings: Fig12Settings) -> Findings:
    """The entry from what was measured."""
    names = list(dict.fromkeys(policy for policy, _, _ in timing.timed))
    full = [name for name in names if name.startswith(FULL)]
    others = [name for name in names if name not in full]
    rows, details, gains, none = timing.rows(), [], {}, []
    for batch, budget in itertools.product(settings.batches, settings.budgets):
        best, held = (best_of(timing, n, budget, batch) for n in (full, others))
        ratio_R, base_R = (
            np.asarray(timing[name, budget, batch].hit_ratio) for name in (best, held)
        )
        at = f"{budget}, batch {batch}"
        details.append(
            f"{at}: {np.median(ratio_R):.2f} ({best}) against {np.median(base_R):.2f} "
            f"({held})."
        )
        if not base_R.all():
            continue
        over_R = ratio_R / base_R
        gain, (_, spread) = median_and_spread(over_R)
        gains[at] = gain - 1
        if abs(gain - 1) <= spread:
            none.append(at)
        name = f"cache ratio over the best baseline's, {at}"
        rows.append(median_metric(best, name, over_R.tolist(), "1"))
    low, high = (100 * end(gains.values(), default=0.0) for end in (min, max))
    if none:
        details.append(f"No difference beyond the rounds' spread: {'; '.join(none)}.")
    return Findings(
        answer=f"SMoE's cache ratio is {low:+.0f} to {high:+.0f} % of the best "
        f"baseline's (the paper: at least +{100 * PAPER_GAIN:.0f} %).",
        details=details,
        model=model,
        workload=timing.ready.workload(settings),
        metrics=rows,
        limits=[
            *LIMITS,
            AHEAD_LIMIT,
            INLINE_LIMIT,
            "SMoE's ratio counts what it computes after substitution, as the paper's "
            "does: part of its gain is paid in fidelity (rows of its own).",
        ],
        kind="emulated",
        baselines=[*others, "resident"],
        checks=timing.checks(),
        ours=gains,
        plot=lambda path: fig14.plot(path, timing, settings, names),
        summary={"cache_ratio_gain": gains, "no_difference": none},
    )


STUDY = Study(
    name="smoe_fig12",
    question="How much of what a step computes does each policy find on the device "
    "(SMoE fig. 12)?",
    settings=Fig12Settings,
    measure=run,
    check=check_inputs,
    inline=True,
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

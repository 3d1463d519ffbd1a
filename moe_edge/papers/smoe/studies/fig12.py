"""SMoE, figure 12: cache ratio of SMoE and of the field's cache policies.

Every policy runs with one pool of slots for all layers and with as many slots for each
layer; AdapMoE's plan gives each layer slots of its own. The better one counts, for SMoE
and for what it is held against. Of HybriMoE only the eviction runs, of AdapMoE only the
slots: the names say so.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_edge.bench.cases import past_sequences
from moe_edge.bench.engines import Bench
from moe_edge.bench.offloading import studied
from moe_edge.bench.study import Study
from moe_edge.bench.timed_cases import LAYER, TIMING, Timing, check_prompts
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.metrics.frames import Rows, Tables, frame, median
from moe_edge.model.config import ModelConfig
from moe_edge.offload.slot_plan import static_hit_curves
from moe_edge.papers.smoe.studies import fig14
from moe_edge.papers.smoe.studies.fig14 import BudgetSettings

FULL = "SMoE"
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


def measure(settings: Fig12Settings, rows: Rows) -> None:
    """Measures all policies."""
    named = functools.partial(policies, horizons=settings.horizons)
    with Bench(settings.checkpoint, settings=settings) as bench:
        timing = fig14.time_in(bench, settings, named, past_sequences(bench, settings))
        timing.tell(rows, bench.model, settings)
    tell(rows, timing)


def tell(rows: Rows, timing: Timing) -> None:
    """Adds the ratio of the better SMoE to the best baseline, by their medians."""
    names = list(dict.fromkeys(policy for policy, _, _ in timing.timed))
    full = [name for name in names if name.startswith(FULL)]
    others = [name for name in names if name not in full]
    for at in dict.fromkeys(key[1:] for key in timing.timed):
        best, held = (
            max(some, key=lambda name: timing[name, *at].median("hit_ratio"))
            for some in (full, others)
        )
        base_R = np.asarray(timing[held, *at].hit_ratio)
        if base_R.all():
            over_R = timing[best, *at].hit_ratio / base_R
            rows("gains", *at, best, held, over=median(over_R))
    rows.about["baselines"] = [*others, "resident"]


def derive(tables: Tables) -> dict[str, Any]:
    """Gains, with the best ratio of both sides: starts may each have had another best
    one. A gain that rounds or starts do not agree on is no difference."""
    timing, gains = tables["timing"], tables["gains"]
    gains["gain"] = gains.over - 1
    gains["none"] = (gains.over_low <= 1) & (gains.over_high >= 1)
    shown = timing[timing.policy != "resident"]
    is_full, at = shown.policy.str.startswith(FULL), ["budget", "batch"]
    for who, some in (("policy", shown[is_full]), ("baseline", shown[~is_full])):
        best = some.groupby(at, sort=False).hit_ratio.max()
        gains = gains.merge(best.rename(f"{who}_ratio").reset_index(), on=at)
    return {"gain": gains, "shown": shown}


FRAMES = {
    "timing": TIMING,
    "layer": LAYER,
    "gains": frame("budget batch policy baseline", "over"),
}
STUDY = Study(
    "smoe_fig12",
    Fig12Settings,
    measure,
    FRAMES,
    derive,
    check=check_prompts,
    inline=True,
)

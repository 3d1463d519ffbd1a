"""A trace of router choices through caches and predictors, without a model.

What `moe-edge replay` does, as a table; nothing here needs JAX.
"""

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_edge.core.checks import CapacityError, ConfigError, check_count
from moe_edge.core.progress import progress
from moe_edge.offload.budget import parse_budget, share_of_blocks
from moe_edge.offload.evict_base import Eviction
from moe_edge.offload.link import EmulatedLink
from moe_edge.offload.slot_plan import least_slots, plan_of, plan_slots
from moe_edge.predict.accuracy import PredictionLog
from moe_edge.predict.base import Predictor, check_look_ahead
from moe_edge.public.arguments import REPLAY_HINTS, refuse_unknown
from moe_edge.public.labels import label, listed
from moe_edge.public.options import PLUG_INS
from moe_edge.simulate.replay.hits import replay as replay_cache
from moe_edge.simulate.replay.lookups import (
    PLAN_NAMES,
    check_horizon,
    context_of,
    equal_slots,
    known_policies,
    policy_of,
)
from moe_edge.simulate.replay.predict import (
    known_predictors,
    predictor_of,
    replay_predictor,
)
from moe_edge.simulate.replay.timed import CostModel, replay_time
from moe_edge.workload.trace_reader import read_trace
from moe_edge.workload.traces import DECODE, Trace

if TYPE_CHECKING:
    import pandas

DEFAULT_BUDGETS = ("25%",)
# A transfer ends long before the next lookup: hits depend on what is predicted alone.
_AT_ONCE = CostModel(route_s=1, experts_s=1, block_bytes=1, link=EmulatedLink(1e30))
_ARGUMENTS = (
    *("trace", "evictions", "predictors", "budgets", "slots_per_layer", "slot_plan"),
    *("eviction_options", "predictor_options", "horizon", "prefetch_limit"),
    *("expert_bytes", "num_experts"),
)


def replay(
    trace: Trace | str | Path,
    *,
    evictions: str | Sequence[Any] = "all",
    predictors: str | Sequence[Any] = ("none",),
    budgets: Sequence[str | float] | None = None,
    slots_per_layer: Sequence[int] | None = None,
    slot_plan: str = "auto",
    eviction_options: Mapping[str, Any] | None = None,
    predictor_options: Mapping[str, Any] | None = None,
    horizon: int = 1,
    prefetch_limit: int = 8,
    expert_bytes: int | None = None,
    num_experts: int | None = None,
    **unknown: Any,
) -> "pandas.DataFrame":
    """A table of every eviction with every predictor and budget, on recorded routing.

    Caches and predictors see the prompts first and are counted in the decode steps, as
    those of `moe-edge replay`. Time is not modelled: a prefetched expert arrives before
    the next layer needs it, so a slow link gives lower hit ratios.

    >>> with model.offload("25%", record="trace") as recording:
    ...     out = recording.generate("Once upon a time", max_new_tokens=8)
    ...     trace = recording.trace
    >>> table = me.replay(trace, evictions=["lru", "belady"], budgets=["10%", "25%"])
    >>> list(table["slots"]), bool((table["hit_ratio"] < 1).all())
    ([38, 38, 96, 96], True)

    Args:
      trace: a file of `moe-edge generate --trace` or a public one (CSV, also gzip), or
        `Engine.trace`.
      evictions, predictors: names, classes or objects; or "all", whose needs the trace
        holds.
      budgets: shares of the experts of all layers that route ("25%", 0.25; the default
        is 25%).
      slots_per_layer: instead of budgets, how many experts of each layer fit.
      slot_plan: how a budget's slots are shared by the layers; as of `Model.offload`.
      eviction_options, predictor_options: of names and classes.
      horizon: layers that predictors look ahead.
      prefetch_limit: most prefetches asked for after one lookup.
      expert_bytes: of one expert (`Model.expert_bytes`), for `bytes_moved`.
      num_experts: of a layer, for files that do not say.
    Returns:
      a row a case: `budget`, `slots` (of all layers), `eviction`, `predictor` (with
      their options), `hit_ratio` (share of a step's distinct experts that needed no
      transfer), `hits`, `misses`, `experts_moved` (misses and prefetches),
      `bytes_moved` (None without `expert_bytes`), `recall` and `precision` (shares of
      the chosen experts that were predicted, and of the predicted ones that were
      chosen; over all layers ahead; None without a predictor). Numbers are of decode
      steps.
    Raises:
      ConfigError: another trace, an unknown name or argument, or what a policy needs
        and the trace lacks.
      CapacityError: a budget of too few slots (the least is named).
    """
    refuse_unknown("replay", unknown, _ARGUMENTS, REPLAY_HINTS)
    for name, count in (("expert_bytes", expert_bytes), ("num_experts", num_experts)):
        if count is not None:
            check_count(name, count)
    check_count("prefetch_limit", prefetch_limit)
    rows = _read(trace, num_experts)
    check_horizon(horizon, rows)
    given_slots = _slots(rows, budgets, slots_per_layer, slot_plan)
    policies = _policies(evictions, rows, eviction_options or {})
    foreseers = _foreseers(predictors, rows, predictor_options or {}, horizon)
    predicted = [
        (name, predictor, _log(rows, predictor, horizon))
        for name, predictor in foreseers
    ]
    table = []
    cases = [*itertools.product(given_slots, policies, predicted)]
    for (budget, layer_S), (policy_name, policy), (name, predictor, log) in progress(
        cases, "cases replayed"
    ):
        if log is None:
            found = replay_cache(rows, policy, layer_S)
            hits, misses = int(found.hits_L.sum()), int(found.misses_L.sum())
            moved = misses
        else:
            looked = predictor, horizon, prefetch_limit
            timed = replay_time(rows, policy, layer_S, _AT_ONCE, *looked)
            hits, misses = timed.counters.hits, timed.counters.misses
            moved = timed.moved.demand.count + timed.moved.prefetch.count
        table.append(
            {"budget": budget, "slots": len(layer_S), "eviction": policy_name}
            | {"predictor": name, "hit_ratio": hits / (hits + misses)}
            | {"hits": hits, "misses": misses, "experts_moved": moved}
            | {"bytes_moved": expert_bytes and moved * expert_bytes}
            | {"recall": log and _share(log.hits_LA, log.chosen_LA)}
            | {"precision": log and _share(log.hits_LA, log.predicted_LA)}
        )
    import pandas  # takes a second, which a refused value need not wait for

    return pandas.DataFrame(table)


def _read(trace: Any, num_experts: int | None) -> Trace:
    if isinstance(trace, (str, os.PathLike)):
        if not Path(trace).is_file():
            raise ConfigError(
                f"trace is {str(trace)!r}, and there is no such file; moe-edge "
                "generate --trace writes one, and engine.trace is one"
            )
        rows = read_trace(Path(trace), num_experts)
    elif isinstance(trace, Trace):
        rows = trace
    else:
        raise ConfigError(
            f"trace is {trace!r:.60}, expected a file or engine.trace (of an engine "
            "made with record='trace')"
        )
    if not (rows.phase == DECODE).any():
        raise ConfigError("the trace has no decode step (phase 1) to measure")
    return rows


def _slots(
    trace: Trace, budgets: Any, slots_per_layer: Any, slot_plan: str
) -> list[tuple[str, tuple[int, ...]]]:
    """The label and `layer_S` of every budget."""
    if slots_per_layer is not None:
        if budgets is not None:
            raise ConfigError("give either budgets or slots_per_layer, got both")
        sizes = listed("slots_per_layer", slots_per_layer)
        for size in sizes:
            check_count("slots_per_layer", size)
        return [(f"{size} a layer", equal_slots(trace, size)) for size in sizes]
    budgets = DEFAULT_BUDGETS if budgets is None else listed("budgets", budgets)
    return [(str(budget), _plan(trace, budget, slot_plan)) for budget in budgets]


def _plan(trace: Trace, budget: Any, slot_plan: str) -> tuple[int, ...]:
    plan, share = plan_of(slot_plan), parse_budget(budget).share
    if share is None:
        raise ConfigError(
            f"budget {budget!r} is a size, and a trace does not say what else a model "
            "keeps on the device; give a share of the experts ('25%', 0.25) or "
            "slots_per_layer"
        )
    layers, E = np.unique(trace.layer), trace.num_experts
    total = share_of_blocks(share, len(layers) * E)
    least = least_slots(slot_plan, E, len(layers), {})
    if total < least:
        raise CapacityError(
            f"budget {budget!r} is {total} of the trace's {len(layers) * E} experts; "
            f"the minimum of slot plan {slot_plan} is {least}"
        )
    options = context_of(trace).fill(plan, {})
    return plan_slots(slot_plan, total, trace.num_layers, E, layers, **options)


def _policies(
    given: Any, trace: Trace, options: Mapping[str, Any]
) -> list[tuple[str, Eviction]]:
    if isinstance(given, str) and given == "all":
        given = [name for name in known_policies(trace) if name not in PLAN_NAMES]
    found = []
    for one in listed("evictions", given):
        policy = policy_of(one, trace, **options)
        if isinstance(one, str) and one in PLAN_NAMES:
            raise ConfigError(
                f"eviction {one!r} is a plan of slots; write slot_plan={one!r}"
            )
        found.append((label(PLUG_INS["eviction"], one, options), policy))
    return found


def _foreseers(
    given: Any, trace: Trace, options: Mapping[str, Any], horizon: int
) -> list[tuple[str, Predictor]]:
    if isinstance(given, str) and given == "all":
        given = ["none", *known_predictors(trace)]
    found = []
    for one in listed("predictors", given):
        is_none = isinstance(one, str) and one == "none"  # which has no options
        own = {} if is_none else options
        predictor = predictor_of(one, trace, **own)
        check_look_ahead(predictor, horizon)
        found.append((label(PLUG_INS["predictor"], one, own), predictor))
    return found


def _log(trace: Trace, predictor: Predictor, horizon: int) -> PredictionLog | None:
    """How good its predictions are; None of the one that predicts nothing."""
    if type(predictor) is Predictor:
        return None
    return replay_predictor(trace, predictor, horizon)


def _share(part_LA: np.ndarray, whole_LA: np.ndarray) -> float | None:
    whole = int(whole_LA.sum())
    return int(part_LA.sum()) / whole if whole else None

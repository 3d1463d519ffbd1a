"""What an offloaded engine can be asked for, and few cases that hold every pair of it.

A policy that registers itself joins by itself.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from moe_edge.core.checks import ConfigError
from moe_edge.core.plug_in import is_ours
from moe_edge.engine.offload_options import LAYER_IO, OffloadOptions
from moe_edge.engine.refusals import Asked, refuse
from moe_edge.offload.assist_base import ASSISTS
from moe_edge.offload.evict_base import EVICTIONS
from moe_edge.offload.slot_plan import PLANS
from moe_edge.predict.base import PREDICTORS
from moe_edge.route.base import ROUTES

LOSSY = {"substitute": {"a": 0.5}, "drop": {"threshold": 0.3}, "prefer": {"bonus": 0.7}}
PLAN_OPTIONS = {"planned": {"slots": [6, 5]}}
SHARE = "50%"  # 12 of 24 blocks, which `planned` shares out
Case = Mapping[str, Any]


def _ours(registry, without=frozenset()) -> tuple[str, ...]:
    return tuple(
        name
        for name, kind in registry.items()
        if is_ours(kind) and not without & {*getattr(kind, "needs", ())}
    )


# A predictor that needs a profile's files is tried by its own tests.
PARTS: dict[str, tuple] = {
    "model": ("gqa", "gqa_bf16", "q4_0", "linear", "calibrated"),
    "eviction": _ours(EVICTIONS, {"future"}),
    "predictor": tuple(n for n in _ours(PREDICTORS, {"future"}) if n != "probe"),
    "route": _ours(ROUTES),
    "assist": (None, *_ours(ASSISTS)),
    "slot_plan": tuple(PLANS),
    "memory": ("host", "mmap"),
    "layer_io": tuple(io for io in LAYER_IO if io != "direct"),
    "mode": ("layered", "fused"),
    "devices": (1, 2),
    "rows": (None, "joining", "deterministic"),
}
ELSEWHERE = ("model", "devices", "rows")  # no fields of `OffloadOptions`


def options_of(case: Case, trace: str | None = None) -> OffloadOptions:
    """The options of a case, in which what is not said has its default.

    Args:
      trace: a recorded one of the model, for what needs a profile.
    """
    given = {name: value for name, value in case.items() if name not in ELSEWHERE}
    route, plan = case.get("route"), case.get("slot_plan")
    needs_profile = plan == "adapmoe_dp" or case.get("eviction") == "static_oracle"
    return OffloadOptions(
        device_memory=SHARE,
        route_options=LOSSY.get(route, {}),
        slot_plan_options=PLAN_OPTIONS.get(plan, {}),
        profile_trace=(trace or "recorded.csv") if needs_profile else None,
        **given,
    )


def asked_of(case: Case) -> Asked:
    """What an engine of a case would be asked, where and for which rows it runs.

    Raises:
      ConfigError: options that a rule refuses by themselves.
    """
    rows = case.get("rows")
    more = {"has_rows": rows is not None, "deterministic": rows == "deterministic"}
    return Asked.of(options_of(case), devices=case.get("devices", 1), **more)


def is_refused(case: Case) -> bool:
    """Whether a rule refuses a case."""
    try:
        refuse(asked_of(case))
    except ConfigError:
        return True
    return False


def pairs() -> Iterator[dict[str, Any]]:
    """Every value of every part with every value of every other."""
    for (one, ones), (other, others) in itertools.combinations(PARTS.items(), 2):
        for a, b in itertools.product(ones, others):
            yield {one: a, other: b}


def covering(fits: Callable[[Case], bool], seed: int = 0) -> list[dict[str, Any]]:
    """Cases in which every pair stands that any case with it may hold.

    Args:
      fits: whether a pair is one that runs; a case does whose pairs all do.
    """
    draw = random.Random(seed)
    good = {frozenset(pair.items()) for pair in pairs() if fits(pair)}
    open_pairs = set(good)
    cases = []
    while open_pairs:
        first = min(open_pairs, key=lambda pair: sorted(map(str, pair)))
        best: tuple[int, dict[str, Any]] = (0, {})
        for _ in range(12):
            case = _completed(dict(first), good, open_pairs, draw)
            held = len(_held(case) & open_pairs)
            if held > best[0]:
                best = held, case
        if not best[0]:
            open_pairs.discard(first)  # no whole case holds it
            continue
        cases.append(best[1])
        open_pairs -= _held(best[1])
    return cases


def _held(case: Case) -> set[frozenset]:
    return {frozenset(pair) for pair in itertools.combinations(case.items(), 2)}


def _completed(case: dict, good, open_pairs, draw) -> dict[str, Any]:
    """The case with a value for every part: those that hold the most open pairs."""
    for part in draw.sample([*PARTS], len(PARTS)):
        if part in case:
            continue
        values = [v for v in PARTS[part] if _pairs_with(case, part, v) <= good]
        if not values:
            return {}
        draw.shuffle(values)
        case[part] = max(
            values, key=lambda v: len(_pairs_with(case, part, v) & open_pairs)
        )
    return case


def _pairs_with(case: Case, part: str, value: Any) -> set[frozenset]:
    return {frozenset({(part, value), item}) for item in case.items()}

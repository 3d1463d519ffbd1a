"""What does not go together in an engine: one table of rules.

Options, engines, plans and the documentation read it. A rule sees what is known so far
(`Asked`): options alone when they are made, the model once it is open, rows when a
running batch begins. What is not known yet refuses nothing. All that no rule names
runs; `tests/composition` tries it.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from moe_edge.core.checks import ConfigError
from moe_edge.core.plug_in import is_object
from moe_edge.engine import fused_refusals
from moe_edge.engine.asked import Asked, Rule, rules_of
from moe_edge.offload.slot_plan import plan_of
from moe_edge.predict.base import Predictor

RULES: list[Rule] = []
_rule = rules_of(RULES)


class Refusal(NamedTuple):
    """What a rule said."""

    what: str
    reason: str
    remedy: str


def refusals(asked: Asked) -> Iterator[Refusal]:
    """Every rule that refuses what is asked, in the order of the table."""
    for rule in RULES:
        reason = rule.fault(asked)
        if reason is not None:
            yield Refusal(rule.name, reason, rule.remedy)


def refuse(asked: Asked) -> None:
    """Raises ConfigError by the first rule that refuses what is asked."""
    for refusal in refusals(asked):
        raise ConfigError(f"{refusal.reason}; {refusal.remedy}")


# Options alone.


@_rule("eviction `on_demand`", "any predictor", "use predictor none")
def keeps_nothing(asked):
    if asked.eviction is not None and asked.eviction.forgets and asked.predicts:
        return (
            f"eviction {asked.eviction.name} keeps nothing, so predictor "
            f"{asked.predictor.name} has nowhere to put a block"
        )
    return None


@_rule(
    "eviction `static_oracle`, slot plan `adapmoe_dp`",
    "no profile",
    "set profile_trace to a trace (moe-edge generate --trace writes one)",
)
def has_no_profile(asked):
    if (options := asked.options) is None or options.profile_trace:
        return None
    plan = plan_of(options.slot_plan), options.slot_plan_options
    given = [(f"slot plan {options.slot_plan}", *plan)]
    if not is_object(options.eviction):
        name = f"eviction {asked.eviction.name}"
        given.append((name, asked.eviction, options.eviction_options))
    for what, kind, own in given:
        if "profile" in kind.needs and not {*kind.from_context} & {*own}:
            return f"{what} needs a profile"
    return None


@_rule(
    "predictor `oracle`",
    "an engine",
    "replay a trace (moe-edge replay --predictors oracle)",
)
def knows_the_future(asked):
    if (options := asked.options) is None or is_object(options.predictor):
        return None
    kind = asked.predictor
    told = {*kind.from_context} & {*options.predictor_options}
    if "future" in kind.needs and not told:
        return (
            f"predictor {kind.name} knows the choices of a recorded run, which no "
            "engine has"
        )
    return None


@_rule(
    "layer_io `direct`",
    "an emulated link, `offload.memory` other than pinned",
    "change that or use layer_io packed",
)
def direct_over_another_way(asked):
    options = asked.options
    if options is None or options.layer_io != "direct":
        return None
    emulated = options.link_bytes_per_s is not None
    if options.memory == "pinned" and not emulated:
        return None
    over = "an emulated link" if emulated else f"memory {options.memory}"
    return (
        "layer_io direct fetches experts from memory pinned over the real link, got "
        f"{over}"
    )


RULES += fused_refusals.RULES  # of options alone, too


# With a model.


@_rule("`--device_memory`", "a dense model", "run it resident")
def nothing_to_offload(asked):
    if asked.options is None or asked.model is None or asked.model.moe_layers:
        return None
    return "this is a dense model: no experts to offload"


@_rule(
    "a lossy route (`substitute`, `drop`, `prefer`)",
    "sub-experts of a proxy or calibrated gate",
    "use a linear gate or route topk",
)
def route_without_router(asked):
    if _is_lossy(asked) and asked.model.moe.keeps_router:
        return (
            f"route {asked.route.name} compares router weights, which sub-experts of a "
            f"{asked.model.moe.gate} gate share with their parent"
        )
    return None


@_rule(
    "a lossy route",
    "a router whose weights are not its scores",
    "use route topk",
)
def route_weighs_otherwise(asked):
    if _is_lossy(asked) and not asked.model.moe.weighs_by_scores:
        return (
            f"route {asked.route.name} weighs experts by router scores alone, "
            f"{asked.model.model_type} by more"
        )
    return None


def _is_lossy(asked: Asked) -> bool:
    known = asked.model is not None and asked.model.moe_layers
    return bool(known and asked.route is not None and not asked.route.lossless)


@_rule(
    "`offload.zero_copy`",
    "quantised experts without `MOE_EDGE_PACKED=1`, experts with exact GELU without "
    "`MOE_EDGE_FEW_ROWS=cuda`",
    "leave it out",
)
def zero_copy_reads_others(asked):
    options, model = asked.options, asked.model
    if options is None or not options.zero_copy or model is None:
        return None
    from moe_edge.kernels import eights, few  # import JAX, which only this one needs

    if (kind := model.moe.expert_kind) is not None and not eights.takes(kind):
        return (
            f"zero_copy is True and the experts are {kind}; its kernel reads bfloat16 "
            "and float32, and blocks in eights with MOE_EDGE_PACKED=1"
        )
    if not few.takes(name := model.moe.activation):
        return (
            f"zero_copy is True and the experts' activation {name}, which its kernel "
            "lacks without MOE_EDGE_FEW_ROWS=cuda"
        )
    return None


# Several devices.


@_rule(
    "several devices",
    "mode `fused`",
    "use mode layered, whose experts have homes on several, or devices 1",
)
def fused_on_several(asked):
    if asked.devices > 1 and asked.is_fused:
        return f"mode fused runs on one device, got {asked.devices} devices"
    return None


@_rule("several devices", "`offload.layer_io`", "leave it out, or use devices 1")
def words_to_several(asked):
    options = asked.options
    if asked.devices > 1 and options is not None and options.layer_io != "arrays":
        count = f"{asked.devices} devices"
        return f"layer_io {options.layer_io} speaks to one device, got {count}"
    return None


@_rule(
    "several devices",
    "`offload.memory` pinned",
    "use memory host, or devices 1",
)
def pinned_for_one(asked):
    options = asked.options
    if asked.devices > 1 and options is not None and options.memory == "pinned":
        return f"memory pinned is pinned for one device, got {asked.devices} devices"
    return None


@_rule(
    "several devices",
    "`hit_curves` of a slot plan",
    "give profile_trace, from which each gets its own",
)
def curves_of_one(asked):
    options = asked.options
    if asked.devices > 1 and options and "hit_curves" in options.slot_plan_options:
        return f"hit_curves are of one device's slots, got {asked.devices} devices"
    return None


# Rows that join and leave.


def _has_companion(predictor: Any) -> bool:
    kind = predictor if isinstance(predictor, type) else type(predictor)
    return kind.companion is not Predictor.companion


@_rule(
    "joining rows (`serve`, `load --target engine`)",
    "`static_prompt`, `moe_infinity`, `shadow`, a trace",
    "load the engine without it (eviction lru, predictor none, no trace)",
)
def rows_of_one_sequence(asked):
    if not asked.has_rows:
        return None
    what = None
    if asked.eviction is not None and asked.eviction.per_sequence:
        what = f"eviction policy {asked.eviction.name}"
    elif asked.predictor is not None and _has_companion(asked.predictor):
        what = f"predictor {asked.predictor.name}"
    elif asked.recorded:
        what = "a trace"
    if what is None:
        return None
    return (
        f"{what} follows one sequence, and a running batch has a row for each of many"
    )


@_rule(
    "`serve --deterministic`",
    "a lossy route, CPU assist",
    "load the engine without it, or leave deterministic",
)
def deterministic_by_company(asked):
    if not (asked.has_rows and asked.deterministic):
        return None
    what = None
    if asked.route is not None and not asked.route.lossless:
        what = f"route {asked.route.name}"
    elif asked.is_assisted:
        what = "experts computed elsewhere (assist)"
    if what is None:
        return None
    return f"deterministic rows and {what}: what a row gets there depends on the others"

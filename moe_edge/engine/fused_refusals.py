"""What mode fused and its options do not go together with: rules of `refusals`."""

from collections.abc import Sequence
from typing import Any

from moe_edge.core.checks import ConfigError, check_shape
from moe_edge.engine.asked import Asked, Rule, rules_of
from moe_edge.model.config import ModelConfig
from moe_edge.model.record import RecordLayout
from moe_edge.offload.assist_base import ASSISTS
from moe_edge.offload.evict_base import CacheSpec, own_choice
from moe_edge.predict.base import PREDICTORS, Predictor
from moe_edge.predict.stale_gate import is_by_programs

RULES: list[Rule] = []
_rule = rules_of(RULES)


def layered_only(options: Any) -> list[str]:
    """Options given that mode fused does not have."""
    found = {
        "predictor": PREDICTORS.class_of(options.predictor) is not Predictor
        and not options.prefetch_in_fused,
        "assist": options.assist is not None and not options.assist_in_fused,
        "link_bytes_per_s": options.link_bytes_per_s is not None,
        "memory": options.memory != "host",
        "layer_io": options.layer_io != "arrays",
    }
    return [name for name, is_given in found.items() if is_given]


@_rule(
    "mode `fused`",
    "a predictor without `offload.prefetch_in_fused`, CPU assist without "
    "`offload.assist_in_fused`, an emulated link, `offload.memory` other than host, "
    "`offload.layer_io`",
    "use mode layered",
)
def fused_without_a_host(asked):
    if asked.is_fused and (wrong := layered_only(asked.options)):
        return f"mode fused has no {', '.join(wrong)}"
    return None


@_rule("mode `fused`", "an eviction or a route for the host", "use mode layered")
def fused_for_the_host(asked):
    if not asked.is_fused:
        return None
    for kind, one in (("eviction", asked.eviction), ("route", asked.route)):
        if one.host_only:
            return f"{kind} policy {one.name!r} runs on the host only"
    return None


@_rule("mode `fused`", "a trace or events", "use mode layered")
def fused_recorded(asked):
    if asked.is_fused and asked.recorded:
        return "mode fused writes no traces and no events, only counters"
    return None


@_rule("`offload.zero_copy`", "mode `layered`", "use mode fused")
def zero_copy_layered(asked):
    options = asked.options
    if options is not None and options.zero_copy and options.mode == "layered":
        return (
            "zero_copy is True and the mode layered, whose experts are transferred "
            "before they are computed"
        )
    return None


def _prefetches(asked: Asked) -> bool:
    return asked.options is not None and asked.options.prefetch_in_fused


@_rule(
    "`offload.prefetch_in_fused`", "mode `layered`", "use mode fused, or leave it out"
)
def prefetch_layered(asked):
    if _prefetches(asked) and asked.options.mode == "layered":
        return "prefetch_in_fused is True and the mode layered, which prefetches anyway"
    return None


@_rule(
    "`offload.prefetch_in_fused`",
    "no predictor, or one whose scores a step's program does not compute by itself",
    "use predictor stale_gate, n_layer_gate, probe or one of partial states",
)
def prefetch_by_the_host(asked):
    if not _prefetches(asked):
        return None
    kind = asked.predictor
    kind = kind if isinstance(kind, type) else type(kind)
    if is_by_programs(kind):
        return None
    return f"prefetch_in_fused is True and the predictor {kind.name}"


@_rule("`offload.prefetch_in_fused`", "`offload.horizon` above 1", "use horizon 1")
def prefetch_of_one_layer(asked):
    if _prefetches(asked) and asked.options.horizon > 1:
        return (
            "prefetch_in_fused is True, which fetches for the next layer alone, and "
            f"horizon is {asked.options.horizon}"
        )
    return None


def _own_choice_beside(option: str, is_on: bool, asked: Asked) -> str | None:
    if not is_on or (method := own_choice(asked.eviction)) is None:
        return None
    return (
        f"{option} is True and eviction policy {asked.eviction.name} has a "
        f"{method} of its own, which is asked block by block"
    )


@_rule(
    "`offload.prefetch_in_fused`",
    "an eviction that is asked block by block (`moe_infinity`)",
    "use eviction lru",
)
def prefetch_one_by_one(asked):
    return _own_choice_beside("prefetch_in_fused", _prefetches(asked), asked)


@_rule("`offload.prefetch_in_fused`", "slot plan `one_pool`", "use slot_plan equal")
def prefetch_in_one_pool(asked):
    if _prefetches(asked) and asked.options.slot_plan == "one_pool":
        return (
            "prefetch_in_fused is True, which fills slots of each layer's own, and the "
            "slot plan one_pool"
        )
    return None


def _overlaps(asked: Asked) -> bool:
    return asked.options is not None and asked.options.overlap_in_fused


@_rule(
    "`offload.overlap_in_fused`", "mode `layered`", "use mode fused, or leave it out"
)
def overlap_layered(asked):
    if _overlaps(asked) and asked.options.mode == "layered":
        return (
            "overlap_in_fused is True and the mode layered, whose experts travel "
            "while others are computed anyway"
        )
    return None


@_rule(
    "`offload.overlap_in_fused`",
    "an eviction that is asked block by block (`moe_infinity`)",
    "use eviction lru",
)
def overlap_one_by_one(asked):
    return _own_choice_beside("overlap_in_fused", _overlaps(asked), asked)


def _is_assisted_in_fused(asked: Asked) -> bool:
    return asked.options is not None and asked.options.assist_in_fused


@_rule("`offload.assist_in_fused`", "mode `layered`", "use mode fused, or leave it out")
def assist_layered(asked):
    if _is_assisted_in_fused(asked) and asked.options.mode == "layered":
        return (
            "assist_in_fused is True and the mode layered, where the host helps anyway"
        )
    return None


@_rule(
    "`offload.assist_in_fused`",
    "no assist, or one that looks at more than how many experts are absent "
    "(`two_front`)",
    "use assist two_pointer, fiddler or all",
)
def assist_by_more_than_rank(asked):
    if not _is_assisted_in_fused(asked):
        return None
    given = asked.options.assist
    if given is None or not ASSISTS.class_of(given).takes_last:
        name = "none" if given is None else ASSISTS.class_of(given).name
        return f"assist_in_fused is True and the assist {name}"
    return None


@_rule(
    "`offload.assist_in_fused`", "`offload.assist_expert_s`", "leave one of them out"
)
def assist_by_an_emulated_host(asked):
    if _is_assisted_in_fused(asked) and asked.options.assist_expert_s is not None:
        return (
            "assist_in_fused is True, whose host computes while a program runs, and "
            f"assist_expert_s is {asked.options.assist_expert_s}, an emulated host's"
        )
    return None


@_rule(
    "`offload.assist_deferred`",
    "no `offload.assist_in_fused`",
    "set assist_in_fused, or leave it out",
)
def deferred_elsewhere(asked):
    options = asked.options
    if options is not None and options.assist_deferred and not options.assist_in_fused:
        return "assist_deferred is True, which is of assist_in_fused, and that is False"
    return None


def check_fits(spec: CacheSpec, config: ModelConfig, hosts: Sequence) -> None:
    """Raises ConfigError where a cache or records `[E, R]` are not this model's."""
    moe, layout = config.moe, RecordLayout.of(config)
    got = spec.num_layers, spec.num_experts, spec.top_k
    wanted = config.num_layers, moe.num_experts, moe.top_k
    if got != wanted:
        raise ConfigError(
            f"the cache is for (layers, experts, top_k) = {got}, the model has {wanted}"
        )
    for layer in config.moe_layers:
        name = f"expert records of layer {layer}"
        check_shape(name, hosts[layer], (moe.num_experts, layout.size))

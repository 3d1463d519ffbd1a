"""A route trace as the lookups an engine would make, and policies built from it."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from moe_edge.core.checks import ConfigError, check_count, check_known
from moe_edge.offload.evict_belady import future_uses
from moe_edge.offload.policy import POLICIES, CacheSpec, EvictionPolicy, get_policy
from moe_edge.offload.slot_plan import plan_slots, static_hit_curves
from moe_edge.workload.traces import DECODE, PREFILL, Trace, expert_counts

SLOT_PLAN = "adapmoe_dp"  # a plan of slots, with lru inside
POLICY_NAMES = (*POLICIES, SLOT_PLAN)


class RoutedLayer(NamedTuple):
    """What the router chose in one step at one layer.

    ids_TK: int32 with padding E, as caches and predictors expect it.
    scores_TE: float32, or None if the trace has none.
    new_sequence: the first lookup of a prefill that follows decoding.
    """

    phase: int
    step: int
    layer: int
    ids_TK: np.ndarray
    scores_TE: np.ndarray | None
    new_sequence: bool


def lookups(trace: Trace) -> Iterator[RoutedLayer]:
    """All lookups in order of step and layer."""
    ids_TK = np.where(trace.ids_TK < 0, trace.num_experts, trace.ids_TK)
    starts, scores_TE, before = trace.bounds[:-1], None, PREFILL
    columns = (trace.phase, trace.step, trace.layer)
    heads = zip(*(column[starts].tolist() for column in columns), strict=True)
    ends = trace.bounds[1:].tolist()
    for start, end, head in zip(starts.tolist(), ends, heads, strict=True):
        if trace.scores_TE is not None:
            scores_TE = trace.scores_TE[start:end].astype(np.float32)
        new = before == DECODE and head[0] == PREFILL
        yield RoutedLayer(*head, ids_TK[start:end], scores_TE, new)
        before = head[0]


def equal_slots(trace: Trace, slots_per_layer: int) -> tuple[int, ...]:
    """`layer_S` of a cache with equally many slots for every layer that routes.

    Raises:
      ConfigError: fewer than two slots a layer, the engine's minimum.
    """
    if slots_per_layer < 2:
        raise ConfigError(
            f"{slots_per_layer} slots a layer, expected at least 2: one block computes "
            "while the next one travels"
        )
    return tuple(np.repeat(np.unique(trace.layer), slots_per_layer).tolist())


def slots_for(name: str, trace: Trace, slots_per_layer: int) -> tuple[int, ...]:
    """`layer_S` of a policy: equal slots, or AdapMoE's plan of the same total.

    The plan is made from the prompt's counts, which are known before decoding.
    """
    layer_S = equal_slots(trace, slots_per_layer)
    if name != SLOT_PLAN:
        return layer_S
    layers = np.unique(trace.layer)
    return plan_slots(
        name,
        len(layer_S),
        trace.num_layers,
        trace.num_experts,
        layers,
        hit_curves=static_hit_curves(expert_counts(trace, PREFILL)[layers]),
        top_k=trace.top_k,
    )


def cache_spec(trace: Trace, layer_S: tuple[int, ...]) -> CacheSpec:
    """The shape of a cache for this trace."""
    return CacheSpec(trace.num_layers, trace.num_experts, trace.top_k, tuple(layer_S))


def check_holds(kind: str, name: str, needs: frozenset[str], trace: Trace) -> None:
    """Raises ConfigError if the trace lacks what a policy or predictor reads."""
    missing = sorted(needs - trace.holds)
    if missing:
        where = {
            "scores": "a trace of ours written with its scores.npz has them",
            "hidden": "no trace has hidden states; run the engine",
            "partial_state": "no trace has partial states; run the engine",
        }
        hints = "; ".join(where.get(field, "no trace has it") for field in missing)
        raise ConfigError(
            f"{kind} {name} needs {', '.join(missing)}, and the trace has only "
            f"{', '.join(sorted(trace.holds))}: {hints}"
        )


def check_horizon(horizon: int, trace: Trace) -> None:
    """Raises ConfigError unless 1 <= horizon <= layers of the trace."""
    check_count("horizon", horizon)
    if horizon > trace.num_layers:
        raise ConfigError(
            f"horizon {horizon}, expected at most the {trace.num_layers} layers of the "
            "trace"
        )


def known_policies(trace: Trace) -> list[str]:
    """Names of the policies whose needs the trace holds."""
    known = [name for name, cls in POLICIES.items() if cls.needs <= trace.holds]
    return [*known, SLOT_PLAN]


def policy_of(name: str, trace: Trace) -> EvictionPolicy:
    """A policy by name; what it must know beforehand comes from the trace.

    Belady gets the future. `static_oracle` gets the counts of the decode steps, which
    are what hit ratios are measured on. `static_prompt` learns in the first prefill.

    Raises:
      ConfigError: an unknown name, or needs the trace does not hold.
    """
    check_known("cache policy", name, POLICY_NAMES)
    if name == SLOT_PLAN:
        return get_policy("lru")
    check_holds("cache policy", name, POLICIES[name].needs, trace)
    options = {}
    if name == "belady":
        options["future"] = _future(trace)
    elif name == "static_oracle":
        options["profile"] = expert_counts(trace, DECODE)
    elif name == "static_prompt":
        options["prompt_steps"] = max(1, _prompt_steps(trace))
    return get_policy(name, **options)


def _prompt_steps(trace: Trace) -> int:
    decode = trace.step[trace.phase == DECODE]
    end = decode.min() if len(decode) else trace.step.max() + 1
    return int(end - trace.step.min())


def _future(trace: Trace) -> list:
    row, rank = np.nonzero(trace.ids_TK >= 0)
    return future_uses(
        trace.step[row],
        trace.layer[row],
        trace.ids_TK[row, rank],
        trace.num_layers,
        trace.num_experts,
    )

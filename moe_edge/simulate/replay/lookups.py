"""A route trace as the lookups an engine would make, and policies built from it."""

from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from moe_edge.core.checks import ConfigError, check_count, check_known
from moe_edge.core.context import Context
from moe_edge.core.plug_in import Registry, needed
from moe_edge.offload.evict_base import EVICTIONS, CacheSpec, Eviction
from moe_edge.offload.evict_belady import future_uses
from moe_edge.offload.slot_plan import PLANS, plan_slots, static_hit_curves
from moe_edge.workload.traces import DECODE, PREFILL, Trace, expert_counts

# Plans that learn from the run are policies of their own, with lru inside.
PLAN_NAMES = tuple(name for name, plan in PLANS.items() if plan.needs)
POLICY_NAMES = ChainMap(EVICTIONS, dict.fromkeys(PLAN_NAMES))  # whose keys both are


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
      ConfigError: less than two, the engine's minimum, or more than experts.
    """
    if slots_per_layer > trace.num_experts:
        raise ConfigError(
            f"{slots_per_layer} slots a layer, expected at most the "
            f"{trace.num_experts} experts that a layer has"
        )
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
    if name not in PLAN_NAMES:
        return layer_S
    sizes = len(layer_S), trace.num_layers, trace.num_experts
    options = context_of(trace).fill(PLANS[name], {})
    return plan_slots(name, *sizes, np.unique(trace.layer), **options)


def context_of(trace: Trace) -> Context:
    """What replay knows of a trace, for policies that ask.

    `profile`: counts of the decode steps, which are what hit ratios are measured on;
    `hit_curves`: from the prompt's counts, which are known before decoding.
    """
    prompt = expert_counts(trace, PREFILL)[np.unique(trace.layer)]
    return Context(
        future=lambda: _future(trace),
        choices=lambda: chosen_by_step(trace),
        profile=lambda: expert_counts(trace, DECODE),
        prompt_steps=lambda: _prompt_steps(trace),
        hit_curves=lambda: static_hit_curves(prompt),
        top_k=lambda: trace.top_k,
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
    return [*replayable(EVICTIONS, trace), *PLAN_NAMES]


def replayable(registry: Registry, trace: Trace) -> list[str]:
    """Names of a kind whose needs a trace holds, and whose options all have a value."""
    context = context_of(trace)
    return [
        name
        for name, kind in registry.items()
        if kind.needs <= trace.holds
        and all(kind.from_context.get(n) in context for n in needed(kind))
    ]


def policy_of(policy: str | type | Eviction, trace: Trace, **options) -> Eviction:
    """The policy of a name, a class or an object; what it must know beforehand comes
    from the trace.

    Raises ConfigError for an unknown name, or needs the trace does not hold.
    """
    if isinstance(policy, str):
        check_known("cache policy", policy, POLICY_NAMES)
        policy = "lru" if policy in PLAN_NAMES else policy
    return made_for(EVICTIONS, policy, trace, options)


def made_for(registry: Registry, given: Any, trace: Trace, options: Mapping[str, Any]):
    """A policy or predictor for a trace; ConfigError: it needs what the trace lacks."""
    kind = registry.class_of(given)
    check_holds(registry.kind, kind.name, kind.needs, trace)
    return registry.make(given, options, context_of(trace))


def _prompt_steps(trace: Trace) -> int:
    decode = trace.step[trace.phase == DECODE]
    end = decode.min() if len(decode) else trace.step.max() + 1
    return max(1, int(end - trace.step.min()))


def _future(trace: Trace) -> list:
    row, rank = np.nonzero(trace.ids_TK >= 0)
    return future_uses(
        trace.step[row],
        trace.layer[row],
        trace.ids_TK[row, rank],
        trace.num_layers,
        trace.num_experts,
    )


def chosen_by_step(trace: Trace) -> np.ndarray:
    """int32 [steps, L, M]: distinct experts of each lookup, best rank first, then -1.

    Steps are numbered from 0 without gaps, as an oracle counts them.
    """
    distinct = [
        [e for e in dict.fromkeys(r.ids_TK.T.ravel().tolist()) if e < trace.num_experts]
        for r in lookups(trace)
    ]
    steps, step_G = np.unique(trace.step[trace.bounds[:-1]], return_inverse=True)
    width = max(map(len, distinct))
    chosen_SLM = np.full((len(steps), trace.num_layers, width), -1, np.int32)
    layer_G = trace.layer[trace.bounds[:-1]]
    for step, layer, ids in zip(step_G, layer_G, distinct, strict=True):
        chosen_SLM[step, layer, : len(ids)] = ids
    return chosen_SLM

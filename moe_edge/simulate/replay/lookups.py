"""A route trace as the lookups an engine would make, and policies built from it."""

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moe_edge.core.checks import ConfigError, check_count, check_known
from moe_edge.core.context import Context
from moe_edge.core.plug_in import Registry
from moe_edge.core.plug_in_options import needed
from moe_edge.offload.evict_base import EVICTIONS, CacheSpec, Eviction
from moe_edge.offload.evict_belady import future_uses
from moe_edge.offload.slot_plan import PLANS, plan_slots, static_hit_curves
from moe_edge.predict.predictor_run import PredictorRun
from moe_edge.workload.traces import DECODE, PREFILL, Trace, expert_counts

# Plans that learn from the run are policies of their own, with lru inside.
PLAN_NAMES = tuple(name for name, plan in PLANS.items() if plan.needs)
POLICY_NAMES = ChainMap(EVICTIONS, dict.fromkeys(PLAN_NAMES))  # whose keys both are


class RoutedLayer(NamedTuple):
    """What the router chose in one step at one layer, or for prompts (`observations`).

    ids_TK: int32 with padding E, as caches and predictors expect it.
    scores_TE: float32, or None if the trace has none.
    weights_TK: float32, of one step's lookup; None of whole prompts.
    new_sequence: the first lookup of a prefill that follows decoding.
    sequences: the requests of the rows.
    length: S, tokens of a row.
    """

    phase: int
    step: int
    layer: int
    ids_TK: np.ndarray
    scores_TE: np.ndarray | None
    new_sequence: bool
    sequences: list[int]
    length: int = 1
    weights_TK: np.ndarray | None = None

    def show(self, run: PredictorRun) -> None:
        """Shows it to a predictor, as an engine would."""
        rows = len(self.sequences), self.length
        shown = self.layer, self.ids_TK, self.scores_TE
        run.show(*shown, sequences=self.sequences, shape_BS=rows)


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
        sequences = trace.request[start:end].tolist()
        seen = ids_TK[start:end], scores_TE, new, sequences
        yield RoutedLayer(*head, *seen, weights_TK=trace.weights_TK[start:end])
        before = head[0]


def observations(trace: Trace) -> Iterator[RoutedLayer]:
    """What an engine shows of these lookups to a predictor: prompts layer by layer.

    The prompts between two decode steps are one batch, a row a request; the chunks in
    which an engine may have passed long ones are not known.
    """
    prompt: list[RoutedLayer] = []
    for routed in lookups(trace):
        if routed.phase == DECODE:
            yield from whole_prompts(prompt, trace.num_experts)
            prompt = []
            yield routed
        else:
            prompt.append(routed)
    yield from whole_prompts(prompt, trace.num_experts)


def whole_prompts(parts: Sequence[RoutedLayer], num_experts: int) -> list[RoutedLayer]:
    """The lookups of prompts, token by token, as one of all tokens for every layer."""
    found = []
    for layer in sorted({part.layer for part in parts}):
        mine = [part for part in parts if part.layer == layer]
        of_T = np.concatenate([part.sequences for part in mine])
        numbers, row_T, tokens_B = np.unique(
            of_T, return_inverse=True, return_counts=True
        )
        B, S = len(numbers), int(tokens_B.max())
        order_T = np.argsort(row_T, kind="stable")
        place_T = np.empty(len(of_T), np.int64)  # of B * S, where a row's end is padded
        first_B = np.cumsum(tokens_B) - tokens_B
        in_row_T = np.arange(len(of_T)) - first_B[row_T[order_T]]
        place_T[order_T] = row_T[order_T] * S + in_row_T
        ids_TK = np.concatenate([part.ids_TK for part in mine])
        all_TK = np.full((B * S, ids_TK.shape[1]), num_experts, np.int32)
        all_TK[place_T] = ids_TK
        all_TE = None
        if mine[0].scores_TE is not None:
            all_TE = np.zeros((B * S, num_experts), np.float32)
            all_TE[place_T] = np.concatenate([part.scores_TE for part in mine])
        head, new = mine[0], parts[0].new_sequence and not found
        where = head.phase, head.step, layer
        found.append(RoutedLayer(*where, all_TK, all_TE, new, numbers.tolist(), S))
    return found


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

    Args:
      options: of a name or a class.
    Raises:
      ConfigError: an unknown name, or needs the trace does not hold.
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

    Steps are numbered from 0 without gaps, as an oracle counts them; prompts between
    decode steps are one.
    """
    E, step, before, distinct = trace.num_experts, -1, trace.num_layers, []
    for routed in observations(trace):
        step += routed.layer <= before
        before = routed.layer
        ids = [e for e in dict.fromkeys(routed.ids_TK.T.ravel().tolist()) if e < E]
        distinct.append((step, routed.layer, ids))
    width = max(len(ids) for *_, ids in distinct)
    chosen_SLM = np.full((step + 1, trace.num_layers, width), -1, np.int32)
    for step, layer, ids in distinct:
        chosen_SLM[step, layer, : len(ids)] = ids
    return chosen_SLM

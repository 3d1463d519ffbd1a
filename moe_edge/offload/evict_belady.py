"""Belady's rule: the bound no online policy passes. For replay: it knows the trace."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from moe_edge.core.arrays import set_at
from moe_edge.core.checks import ConfigError
from moe_edge.core.plug_in import register
from moe_edge.offload.evict_base import CacheSpec, Eviction, State

_BLOCK_STRIDE = 2**40  # above any clock: uses of all blocks in one sorted array


def future_uses(steps_R, layers_R, experts_R, num_layers: int, num_experts: int):
    """The `future` option of belady from trace columns.

    Args:
      steps_R, layers_R, experts_R: int, one entry a use, in any order.
    Returns:
      future[layer][expert] = sorted int64 array of the steps that use the block.
    """
    keys_R = np.asarray(layers_R, np.int64) * num_experts + np.asarray(experts_R)
    order = np.lexsort((steps_R, keys_R))
    cuts = np.searchsorted(keys_R[order], np.arange(1, num_layers * num_experts))
    parts = np.split(np.asarray(steps_R, np.int64)[order], cuts)
    return [parts[i : i + num_experts] for i in range(0, len(parts), num_experts)]


@register
@dataclasses.dataclass(frozen=True, eq=False)
class Belady(Eviction):
    """Gives up the block whose next use lies furthest ahead.

    `future[layer][expert]`: the steps, in the count that `touch` is given, at which
    lookups use the block.
    """

    future: Sequence | None = None

    name = "belady"
    SOURCE = "Belady 1966, A study of replacement algorithms: MIN"
    needs = frozenset({"ids", "future"})
    from_context = {"future": "future"}
    host_only = True

    def __post_init__(self):
        if self.future is None:
            raise ConfigError("belady got no future; replay a trace to use it")

    def init(self, spec: CacheSpec, xp=np) -> State:
        L, E = spec.num_layers, spec.num_experts
        if len(self.future) != L or any(len(row) != E for row in self.future):
            raise ConfigError(f"belady's future must list {L} layers of {E} experts")
        uses = [
            2 * (np.asarray(steps, np.int64) * L + layer)
            + (layer * E + e) * _BLOCK_STRIDE
            for layer, row in enumerate(self.future)
            for e, steps in enumerate(row)
        ]
        uses_R = np.sort(np.concatenate([*uses, [np.iinfo(np.int64).max]]))
        state = {**super().init(spec, np), "uses_R": uses_R}
        # Before the first lookup the next use is the first one.
        next_B = np.append(_next_use(state["uses_R"], np.arange(L * E), -1), 0)
        return {**state, "next_B": next_B}

    def touch(self, state: State, layer, ids_TK, scores_TE, step) -> State:
        state = super().touch(state, layer, ids_TK, scores_TE, step)
        keys = state["key_LE"][layer, ids_TK]
        next_use = _next_use(state["uses_R"], keys, int(state["clock"]))
        return {**state, "next_B": set_at(state["next_B"], keys, next_use)}

    def value(self, state: State):
        return -state["next_B"][state["key_S"]].astype(np.float64)


def _next_use(uses_R, keys, clock):
    """Clock of the first use of each block after `clock`; 2**40 if there is none."""
    base = keys.astype(np.int64) * _BLOCK_STRIDE
    at = np.searchsorted(uses_R, base + clock, side="right")
    return np.minimum(uses_R[at] - base, _BLOCK_STRIDE)

"""What every eviction policy shares: the cache's shape, its state, and the pick.

A policy is three pure functions over a dict of arrays, so that the same object runs
in the layered engine, in replay, in the simulator (NumPy) and inside jit
(jax.numpy). Axes: S slots, L layers, E experts (blocks) of a layer, B = L*E + 1: one
entry a block, indexed by block key, and one spare entry at the end. Key -1, which is
what an empty slot holds and what a padding id maps to, is that spare entry.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from moe_edge.core.arrays import module_of, set_at
from moe_edge.core.checks import ConfigError, check_count
from moe_edge.core.plug_in import PlugIn, Registry

# key_S, last_B, clock and key_LE always; a policy adds arrays indexed by block or by
# layer. Only key_S is indexed by slot: a cache may hand `victim` a part of the slots.
State = dict[str, Any]
NEVER = np.iinfo(np.int32).max
FEW = 32  # ids of a lookup


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """The shape of a slot cache; block key = layer * num_experts + expert."""

    num_layers: int  # L: every layer of the model, dense ones included
    num_experts: int  # E: blocks of a layer
    top_k: int
    layer_S: tuple[int, ...]  # the layer a slot belongs to; -1: any layer may use it

    def __post_init__(self):
        for name in ("num_layers", "num_experts", "top_k"):
            check_count(name, getattr(self, name))
        wrong = [x for x in self.layer_S if not -1 <= x < self.num_layers]
        if wrong or not self.layer_S:
            raise ConfigError(
                f"layer_S has {len(self.layer_S)} slots, layers {wrong[:4]} of them "
                f"unknown; expected at least one slot, layers -1..{self.num_layers - 1}"
            )

    @property
    def num_slots(self) -> int:
        return len(self.layer_S)


def base_state(spec: CacheSpec, xp=np) -> State:
    """State with every slot empty and no block ever used."""
    L, E = spec.num_layers, spec.num_experts
    key_LE = np.full((L, E + 1), -1, np.int32)  # column E: the padding id
    key_LE[:, :E] = np.arange(L * E, dtype=np.int32).reshape(L, E)
    return {
        "key_S": xp.full((spec.num_slots,), -1, dtype=np.int32),
        "key_LE": xp.asarray(key_LE),
        "last_B": xp.full((L * E + 1,), -1, dtype=np.int32),  # time of the last use
        # 2 * (step * L + layer) of the last lookup: even times for hits, odd ones for
        # the blocks that entered after it. int32 lasts 22 million steps of 48 layers.
        "clock": xp.asarray(0, dtype=np.int32),
    }


def put(state: State, slot, key) -> State:
    """Says that block `key` is now in `slot` (-1: the slot is empty again).

    Entering counts as a use just after the last lookup: later than that lookup's hits,
    and a prefetched block is not the oldest one when it arrives. NumPy arrays are
    changed in place.
    """
    key_S, last_B, now = state["key_S"], state["last_B"], state["clock"] + 1
    if isinstance(key_S, np.ndarray):
        key_S[slot], last_B[key] = key, now
        return state
    key_S, last_B = set_at(key_S, slot, key), set_at(last_B, key, now)
    return {**state, "key_S": key_S, "last_B": last_B}


def pick(state: State, value_S, protected_S):
    """The slot to give up: empty first, else lowest value, oldest use, lowest slot.

    Args:
      value_S: finite numbers, or None where only the time of the last use counts.
      protected_S: bool; at least one slot must be unprotected.
    """
    key_S = state["key_S"]
    xp = module_of(key_S)
    last_S = xp.where(key_S < 0, -2, state["last_B"][key_S])
    out_S = protected_S
    if value_S is not None:
        value_S = xp.where(protected_S, np.inf, xp.where(key_S < 0, -np.inf, value_S))
        out_S = value_S > value_S.min()
    return xp.where(out_S, NEVER, last_S).argmin()


def mean_scores(ids_TK, scores_TE, spare):
    """Gate scores averaged over the tokens of a step that are not padding: [E]."""
    xp = module_of(scores_TE)
    real_T1 = xp.any(ids_TK != spare, axis=1, keepdims=True).astype(np.float32)
    total = xp.maximum(xp.sum(real_T1), np.float32(1))
    return xp.sum(scores_TE * real_T1, axis=0) / total


class Eviction(PlugIn):
    """Decides which slot is given up. Subclasses are frozen dataclasses.

    Modes layered and fused, replay and the cluster simulator call

        init     once, and whenever the slots are emptied
        touch    once a layer and step, before anything is fetched for it (mode fused:
                 once for each part of a layer that exceeds its slots)
        victim   once for each block that needs a slot; or, on the host, where `victim`
                 is this class's own: `order` once after a `touch`, then `gave_up` for
                 each slot of it that is taken
        resume   of a policy with `per_sequence`: when another sequence goes on

    and enter what the cache does with `put`. A policy writes `value`, or names an array
    in `ranks`, or writes `victim`; and `touch` for what it takes note of. It knows no
    time, device or byte. Every function returns the state to use from then on. NumPy
    arrays of the state it was given may have been changed (as a donated buffer): do not
    use that one again. Mode fused calls all of it inside jit, with jax.numpy's arrays
    (`core.arrays.module_of`); a policy of another package is traced when the engine is
    made. A `victim` that is protected, or no slot, is refused by name.

    Attributes:
      needs: what it cannot do without: ids, scores (of a run: `touch` then gets them),
        future, profile (of a replayed trace, or of `profile_trace`).
      from_context: of prompt_steps, profile, future, choices, top_k, model.
      host_only: NumPy only, not inside jit: mode fused refuses it, auto takes layered.
      forgets: `touch` may empty slots (key -1 in `key_S`).
      per_sequence: its state is the record of one sequence: engines keep one for each,
        and a server, whose rows join and leave, refuses it.
      per_block: arrays [B] that it adds to the state, zeros.
      ranks: the array [B] that says what a block is worth.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"ids"})
    host_only: ClassVar[bool] = False
    forgets: ClassVar[bool] = False
    per_sequence: ClassVar[bool] = False
    per_block: ClassVar[Mapping[str, type]] = {}
    ranks: ClassVar[str | None] = None

    def init(self, spec: CacheSpec, xp=np) -> State:
        """State of an empty cache; `xp` is numpy or jax.numpy."""
        state = base_state(spec, xp)
        B = state["last_B"].shape
        return state | {
            name: xp.zeros(B, kind) for name, kind in self.per_block.items()
        }

    def resume(self, state: State) -> State:
        """A kept record goes on; `key_S` is what the slots hold by now.

        What it says of blocks that have left the slots meanwhile is forgotten here. A
        block that left and came back cannot be told from one that stayed.
        """
        return state

    def touch(self, state: State, layer, ids_TK, scores_TE, step) -> State:
        """Takes note of one layer's lookup.

        Args:
          ids_TK: int32, the experts chosen, hits and misses; E is padding.
          scores_TE: float32 >= 0 gate scores of all experts, or None if not needed.
          step: a count that rises by one every step (all layers once).
        """
        clock = 2 * (step * state["key_LE"].shape[0] + layer)
        last_B = state["last_B"]
        is_host = isinstance(last_B, np.ndarray)
        xp = np if is_host else module_of(last_B)
        clock = xp.asarray(clock, dtype=np.int32)
        if is_host and ids_TK.size <= FEW:
            # One by one: an indexed assignment takes ten times as long, and gives up
            # Python's lock, for which the queue's thread waits.
            E, padding = state["key_LE"].shape[1] - 1, len(last_B) - 1
            for expert in ids_TK.reshape(-1).tolist():
                last_B[layer * E + expert if expert < E else padding] = clock
        elif is_host:
            last_B[state["key_LE"][layer, ids_TK]] = clock
        else:
            last_B = set_at(last_B, state["key_LE"][layer, ids_TK], clock)
        return {**state, "last_B": last_B, "clock": clock}

    def value(self, state: State):
        """Worth of what each slot holds [S]; None: only the last use counts."""
        if self.ranks is None:
            return None
        return state[self.ranks][state["key_S"]].astype(np.float32)

    def gave_up(self, state: State, slot) -> State:
        """The block in a slot is about to leave it."""
        return state

    def order(self, state: State) -> np.ndarray:
        """All slots as the base's `victim` would give them up one by one; NumPy only.

        Hosts ask this, unless a subclass has a `victim` of its own.

        It holds until the next `touch`, but for slots that got another block since: so
        a host that brings several blocks after one lookup sorts once.
        """
        key_S, value_S = state["key_S"], self.value(state)
        last_S = state["last_B"][key_S]
        last_S[key_S < 0] = -2
        if value_S is None:
            return last_S.argsort(kind="stable")
        return np.lexsort((last_S, np.where(key_S < 0, -np.inf, value_S)))

    def victim(self, state: State, protected_S) -> tuple[Any, State]:
        """(slot to give up, state); never a protected slot, an empty one first.

        Args:
          protected_S: bool, aligned with key_S; at least one must be False.
        """
        slot = pick(state, self.value(state), protected_S)
        return slot, self.gave_up(state, slot)


EVICTIONS = Registry(
    "eviction policy", Eviction, "eviction_options", "moe_edge.offload"
)


def own_choice(policy: Eviction | type[Eviction]) -> str | None:
    """The method by which a policy chooses victims one by one; None: it has none."""
    kind = policy if isinstance(policy, type) else type(policy)
    for name in ("victim", "gave_up"):
        if getattr(kind, name) is not getattr(Eviction, name):
            return name
    return None


def get_eviction(policy: str | type | Eviction, **options) -> Eviction:
    """The policy of a name, a class, or an object.

    Raises:
      ConfigError: unknown name or option (the known ones are listed), or a bad value.
    """
    return EVICTIONS.make(policy, options)


def check_needs(policy: Eviction, available) -> None:
    """Raises ConfigError unless `available` holds all fields the policy needs."""
    missing = sorted(policy.needs - set(available))
    if missing:
        raise ConfigError(
            f"policy {policy.name} needs {', '.join(missing)}, which is not there "
            f"(there is: {', '.join(sorted(available))}); use another policy"
        )

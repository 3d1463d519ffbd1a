"""Least frequently used, and its two frozen forms: counts of the prompt or a profile.

A static policy cannot pin its blocks outright, because the experts of the running step
must have slots. Both static policies rank blocks by frozen counts and give up the
lowest: a block outside the best ones takes the place of one of them only when the
running step leaves no other slot, the least frequent first, and is itself the first
to go when that one comes back.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from moe_edge.core.arrays import count_at, module_of
from moe_edge.core.checks import ConfigError, check_count, check_shape
from moe_edge.core.plug_in import register
from moe_edge.offload.evict_base import CacheSpec, Eviction, State


@register
@dataclasses.dataclass(frozen=True)
class Lfu(Eviction):
    """Gives up the block used by the fewest tokens so far; counts never reset."""

    name = "lfu"
    SOURCE = "the classical baseline, counting tokens"
    per_block = {"count_B": np.int32}
    ranks = "count_B"

    def touch(self, state: State, layer, ids_TK, scores_TE, step) -> State:
        state = super().touch(state, layer, ids_TK, scores_TE, step)
        keys = state["key_LE"][layer, ids_TK]
        return {**state, "count_B": count_at(state["count_B"], keys)}


@register
@dataclasses.dataclass(frozen=True)
class StaticPrompt(Lfu):
    """Keeps the blocks that the prompt used most; later uses count for nothing."""

    prompt_steps: int = 1  # touches with step < prompt_steps are the prompt's

    name = "static_prompt"
    per_sequence = True
    from_context = {"prompt_steps": "prompt_steps"}
    SOURCE = "a static cache, chosen by the prompt"

    def __post_init__(self):
        check_count("prompt_steps", self.prompt_steps)

    def touch(self, state: State, layer, ids_TK, scores_TE, step) -> State:
        state = Eviction.touch(self, state, layer, ids_TK, scores_TE, step)
        # After the prompt the counts go to the spare entry, which no slot reads.
        keys = state["key_LE"][layer, ids_TK]
        keys = module_of(keys).where(step < self.prompt_steps, keys, -1)
        return {**state, "count_B": count_at(state["count_B"], keys)}


@register
@dataclasses.dataclass(frozen=True, eq=False)
class StaticOracle(Eviction):
    """Keeps the most frequent blocks of a given profile: a bound for static caches."""

    # Counts [L, E] of the very run, or of another.
    profile: Sequence | np.ndarray | None = None

    name = "static_oracle"
    SOURCE = "a static cache, chosen by what is known beforehand"
    needs = frozenset({"ids", "profile"})
    from_context = {"profile": "profile"}
    ranks = "count_B"

    def __post_init__(self):
        if self.profile is None:
            raise ConfigError("static_oracle got no profile; give counts [L, E]")

    def init(self, spec: CacheSpec, xp=np) -> State:
        counts_LE = np.asarray(self.profile, np.float32)
        check_shape("profile", counts_LE, (spec.num_layers, spec.num_experts))
        count_B = np.append(counts_LE.reshape(-1), np.float32(0))
        return {**super().init(spec, xp), "count_B": xp.asarray(count_B)}

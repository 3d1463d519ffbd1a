"""An eviction policy: uses that lie further back count less."""

import dataclasses

import numpy as np

import moe_edge as me
from moe_edge.core.arrays import count_at


@dataclasses.dataclass(frozen=True)
class Decayed(me.Eviction):
    """Gives up the block of the lowest sum of uses, each worth less with every step.

    Attributes:
      keep: what a use is worth one lookup of its layer later, in (0, 1].
    """

    keep: float = 0.9

    name = "my_decayed"
    SOURCE = "an example"
    per_block = {"use_B": np.float32}  # in the state, zeros at first
    ranks = "use_B"  # says what a block is worth

    def __post_init__(self):
        if not 0 < self.keep <= 1:
            raise me.ConfigError(f"keep must lie in (0, 1], got {self.keep}")

    def touch(self, state, layer, ids_TK, scores_TE, step):
        """NumPy and jax.numpy alike: it runs in mode layered, fused, and in replay."""
        state = super().touch(state, layer, ids_TK, scores_TE, step)
        keys = state["key_LE"][layer, ids_TK]
        use_B = state["use_B"] * np.float32(self.keep)
        return {**state, "use_B": count_at(use_B, keys)}

"""A server's programs where its blocks are on several devices: each a home.

Rows of pairs are computed where their blocks are, and joined on the first device; they
have the bits that they have in any one place. All else runs on the first device.
"""

from collections.abc import Sequence

import jax
import numpy as np

from moe_edge.cluster.node.programs import PlacedPrograms
from moe_edge.engine.home_programs import HomePrograms
from moe_edge.engine.homes import HomeCalls
from moe_edge.model.config import ModelConfig
from moe_edge.offload.homes import Homes


class ServerHomes(PlacedPrograms):
    """`PlacedPrograms` whose `rows` take the slots of every home.

    A layer with all its blocks here has no program of its own: its rows are joined.
    """

    def __init__(
        self, config: ModelConfig, dtype, homes: Homes, devices: Sequence[jax.Device]
    ):
        super().__init__(config, dtype)
        self.device = devices[0]
        self._calls = HomeCalls(homes, devices)
        self._home = HomePrograms.of(self, weighs=False)
        self.rows = self._rows_of_homes

    def _rows_of_homes(self, x_TD, ids_TK, slots, slot_of: np.ndarray) -> jax.Array:
        """As `PlacedPrograms.rows`.

        Args:
          slots: `[S, R]` of every home (`HomeSlots.array`).
          slot_of: numbered through all homes.
        """
        calls, ids_TK, found = self._calls, np.asarray(ids_TK), {}
        pairs = self.is_pairs(len(ids_TK))
        for home in calls.running("rows", len(ids_TK), slot_of):
            x_of, slots_SR = jax.device_put(x_TD, calls.devices[home]), slots[home]
            own = calls.homes.local(home, slot_of)
            if pairs:
                found[home] = self._home.rows(x_of, own, slots_SR, None)
                continue
            carry = self._home.start(x_of, ids_TK, slots_SR)
            given = x_of, ids_TK, slots_SR, own, None
            found[home], _ = self._home.wave(carry, *given)
        if pairs:
            return self._home.merge(calls.gathered(found))
        home_S1 = np.append(calls.homes.home_S, len(calls.homes))
        slot_E1 = np.append(np.minimum(slot_of, len(home_S1) - 1), len(home_S1) - 1)
        home_P = home_S1[slot_E1][np.sort(ids_TK.reshape(-1), kind="stable")]
        return calls.joined(self._home, found, home_P)


def devices_of_process() -> Sequence[jax.Device]:
    """The homes of a server's blocks: its GPUs, if it has several."""
    there = jax.local_devices()
    return there if jax.default_backend() == "gpu" and len(there) > 1 else ()

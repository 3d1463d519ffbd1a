"""A placer: every block where it is called most, then copies of frequent ones."""

import dataclasses

import numpy as np

import moe_edge as me


@dataclasses.dataclass(frozen=True)
class Favourites(me.Placer):
    """Blocks in order of their calls, each to the server with room that calls it most.

    What room is left holds copies of a server's own most frequent blocks.

    Attributes:
      copies: whether there are any.
    """

    copies: bool = True

    name = "my_favourites"
    SOURCE = "an example"

    def choose(self, problem) -> np.ndarray:
        """bool [N, L, E]; which GPU of a server holds a block is found afterwards."""
        shape = problem.frequency_NLE.shape
        calls_NM = problem.frequency_NLE.reshape(shape[0], -1)
        on_NM = np.zeros(calls_NM.shape, bool)
        room_N = problem.capacity_N.copy()
        for block in np.argsort(-calls_NM.sum(axis=0), kind="stable"):
            with_room_N = np.where(room_N > 0, calls_NM[:, block], -1.0)
            server = int(with_room_N.argmax())
            on_NM[server, block] = True
            room_N[server] -= 1
        if self.copies:
            for server, room in enumerate(room_N):
                wanted_M = np.where(on_NM[server], -1.0, calls_NM[server])
                on_NM[server, np.argsort(-wanted_M, kind="stable")[:room]] = True
        return on_NM.reshape(shape)

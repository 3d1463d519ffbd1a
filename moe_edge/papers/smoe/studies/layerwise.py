"""Layer-wise offload, as a baseline: a whole layer's experts travel each time."""

import time
from concurrent.futures import Future, ThreadPoolExecutor

from moe_edge.engine.base import Engine
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import Weights
from moe_edge.offload.link import TransferLink, wait_until
from moe_edge.offload.slots import Slots, make_slots
from moe_edge.offload.store import HostStore


class LayerwiseEngine(ResidentEngine):
    """All experts of a layer arrive, as one transfer, before the layer runs.

    Two layers have room on the device: while one is computed, the next one travels.
    Nothing is kept between passes. Lossless: the resident engine's programs. Source:
    DeepSpeed and accelerate, as algorithms.md section 6 describes them.

    Args:
      weights: all but the experts, on the device.
      store: the experts.
      link: how they travel.
      **shared: `programs` of another engine.
    """

    may_run_ahead = False  # a step moves experts, and counts them

    def __init__(
        self, weights: Weights, store: HostStore, link: TransferLink, **shared
    ):
        super().__init__(weights, layers_per_program=1, **shared)
        self._store, self._link = store, link
        shape = store.num_experts, store.record_size, store.dtype
        self._rooms: list[Slots] = [make_slots(*shape) for _ in range(2)]
        self._thread = ThreadPoolExecutor(1, "moe_edge-layerwise")
        self._moved_bytes = 0

    def reset_records(self) -> None:
        self._moved_bytes = 0

    def movement(self) -> dict:
        return {"hit_ratio": 0.0, "bytes_moved": self._moved_bytes}

    def close(self) -> None:
        """Ends the transferring thread."""
        self._thread.shutdown()

    def decode(self, session, tokens_B, active_B, on_routing=None):
        """As `Engine.decode`: no program holds the layers together."""
        return Engine.decode(self, session, tokens_B, active_B, on_routing)

    def _send(self, number: int) -> Future:
        """Starts the transfer of the `number`-th MoE layer into its room."""
        layer = self.config.moe_layers[number]
        num_bytes = self._store.num_experts * self._store.block_bytes
        self._moved_bytes += num_bytes
        return self._thread.submit(
            self._link.transfer, num_bytes, time.perf_counter(), self._copy, layer,
            self._rooms[number % 2],
        )  # fmt: skip

    def _copy(self, layer: int, room: Slots) -> None:
        for expert in range(self._store.num_experts):
            room.write(expert, self._store.record(layer, expert))

    def _run_layers(self, session, x, chunk, on_routing):
        moe_layers = self.config.moe_layers
        x.block_until_ready()
        coming, number = self._send(0), 0
        for layer in range(self.config.num_layers):
            experts = None
            if layer in moe_layers:
                _, arrival_s, _ = coming.result()
                wait_until(arrival_s)
                # The layer before has run: its room is free for the layer after.
                x.block_until_ready()
                experts = self._rooms[number % 2].array
                number += 1
                if number < len(moe_layers):
                    coming = self._send(number)
            x = self._run_group(session, layer, (experts,), x, chunk, on_routing)
        # The next pass writes into the room that the last layer reads.
        x.block_until_ready()
        return x

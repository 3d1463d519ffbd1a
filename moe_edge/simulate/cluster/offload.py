"""Servers that serve alone: blocks they lack come from host memory (MoE-Infinity).

The baseline of Prism's table I. Every GPU of a server has a slot cache over all layers
that starts empty, run by the engine's own `OffloadManager` over a queue in computed
time; block e belongs to GPU e mod G of its server. What a layer misses travels over the
host link of its GPU, one block after another and before prefetches, and is computed as
it comes. With `redirect`, a request that finds its server busy goes to the idle server
that its prompt reaches first, and the answer comes back.
"""

import dataclasses

import numpy as np

from moe_edge.core.checks import CapacityError
from moe_edge.offload.link import EmulatedLink
from moe_edge.offload.manager import OffloadManager
from moe_edge.offload.policy import CacheSpec, get_policy
from moe_edge.offload.slot_cache import SlotCache
from moe_edge.offload.virtual_queue import VirtualQueue
from moe_edge.predict.registry import get_predictor
from moe_edge.simulate.cluster.lines import PROMPT, Lines
from moe_edge.simulate.cluster.loop import EXTRA, ClusterLoop

TOKEN_ID_BYTES = 4
_ADMIT = 1 << 30  # event items: from 1 a missed block, from here a redirected request


@dataclasses.dataclass(frozen=True)
class OffloadPolicy:
    """How a server serves alone.

    Attributes:
      eviction, predictor: names of the engine's policies.
      horizon, prefetch_limit: see `OffloadManager`.
      redirect: whether busy servers pass requests on to idle ones.
    """

    eviction: str = "moe_infinity"
    predictor: str = "moe_infinity"
    horizon: int = 1
    prefetch_limit: int = 8
    redirect: bool = False


class CountedQueue(VirtualQueue):
    """A queue that enters what it carries among the cluster's lines."""

    def __init__(self, lines: Lines, gpu: int, block_bytes: int, num_experts: int):
        link = lines.host_links[gpu]
        emulated = EmulatedLink(link.bytes_per_s, link.latency_s)
        super().__init__(emulated, block_bytes, num_experts)
        self._lines, self._gpu = lines, gpu

    def _carried(self, transfer, start_s: float, end_s: float) -> None:
        super()._carried(transfer, start_s, end_s)
        self._lines.loaded(
            self._gpu, start_s, self.transfer_s, self.block_bytes, transfer.cause
        )


class OffloadLoop(ClusterLoop):
    """A cluster of servers that share requests at most.

    Attributes:
      managers: of every server's GPUs.
      redirected: number of a request served elsewhere -> its own server.
    """

    def __init__(self, *args, policy: OffloadPolicy, **kwargs):
        super().__init__(*args, **kwargs)
        self.policy = policy
        self.redirected: dict[int, int] = {}
        block_bytes = self.cost_model.block.num_bytes
        self.managers: list[list[OffloadManager]] = []
        for server, slots_G in enumerate(self.cost_model.cluster.slots(block_bytes)):
            layer = -(-self.pools.num_experts // len(slots_G))  # a GPU's share of it
            if slots_G.min() < layer:
                raise CapacityError(
                    f"a GPU of server {server} holds {slots_G.min()} blocks; serving "
                    f"alone needs room for its share of a layer, {layer}"
                )
            first = self.first_gpu[server]
            self.managers.append(
                [
                    self._manager(first + g, int(slots))
                    for g, slots in enumerate(slots_G)
                ]
            )
        self._step = [0] * len(self.servers)
        self._missed: list[list[tuple[int, float]]] = [[] for _ in self.servers]

    def _manager(self, gpu: int, slots: int) -> OffloadManager:
        pools, policy = self.pools, self.policy
        block_bytes = self.cost_model.block.num_bytes
        any_layer = (-1,) * min(slots, pools.num_blocks)
        spec = CacheSpec(pools.num_layers, pools.num_experts, pools.top_k, any_layer)
        return OffloadManager(
            SlotCache(spec, get_policy(policy.eviction)),
            CountedQueue(self.lines, gpu, block_bytes, pools.num_experts),
            predictor=get_predictor(policy.predictor),
            horizon=policy.horizon,
            prefetch_limit=policy.prefetch_limit,
        )

    @property
    def hit_ratio(self) -> float:
        """Share of block lookups that were there in time, prompts included."""
        found = [m.counters[True] for managers in self.managers for m in managers]
        hits = sum(counters.hits for counters in found)
        return hits / (hits + sum(counters.misses for counters in found))

    # --- requests

    def arrive(self, time_s: float, server: int, number: int) -> None:
        if number + 1 < len(self.requests):
            self._push_arrival(number + 1)
        target = self._target(server) if self.policy.redirect else server
        if target == server:
            self.admit(time_s, server, number)
            return
        self.redirected[number] = server
        num_bytes = TOKEN_ID_BYTES * self.requests[number].input_tokens
        there_s = self.lines.send(server, target, time_s, num_bytes, PROMPT)
        self.servers[target].promised += 1
        self.heap.push(there_s, EXTRA, target, _ADMIT + number)

    def _target(self, server: int) -> int:
        """The server itself unless it is busy and another one is idle."""
        if self.servers[server].idle:
            return server
        send_s = self.cost_model.send_s
        idle = [m for m, state in enumerate(self.servers) if state.idle]
        return min(idle, key=lambda m: send_s(server, m, 1), default=server)

    def finished(self, time_s: float, server: int, number: int) -> None:
        """The answer of a redirected request goes back."""
        if number in self.redirected:
            num_bytes = TOKEN_ID_BYTES * self.requests[number].output_tokens
            home = self.redirected[number]
            there_s = self.lines.send(server, home, time_s, num_bytes, PROMPT)
            self.finish_R[number] = there_s

    # --- steps

    def plan_step(self, time_s: float, server: int, cells: np.ndarray) -> None:
        """Nothing is planned ahead: what is resident changes from layer to layer."""
        state = self.servers[server]
        if any(one.fresh for one in state.running):
            for manager in self.managers[server]:
                manager.new_sequence()
        state.cells = cells
        size = self.pools.num_blocks
        self.counts_NX[server] += np.bincount(cells.reshape(-1), minlength=size)
        self.count_pairs(time_s, server, cells.size, 0)
        self._step[server] += 1

    def route(self, time_s: float, server: int) -> None:
        state, E, K = self.servers[server], self.pools.num_experts, self.pools.top_k
        layer, managers = state.layer, self.managers[server]
        ids_TK = state.cells[:, layer * K : (layer + 1) * K] - layer * E
        counts_E = np.bincount(ids_TK.reshape(-1), minlength=E)
        missed = self._missed[server]
        missed.clear()
        state.end_s = time_s
        for g, manager in enumerate(managers):
            gpu = self.first_gpu[server] + g
            mine_TK = np.where(ids_TK % len(managers) == g, ids_TK, E).astype(np.int32)
            manager.queue.now_s = time_s
            visit = manager.pass_layer(layer, mine_TK, None, self._step[server])
            here, transfers = sorted(visit.hits), visit.transfers
            if here:
                seconds = float(self._block_s(gpu, counts_E[here]).sum())
                end_s = self.lines.compute(gpu, time_s, seconds, "experts")
                state.end_s = max(state.end_s, end_s)
            block_s = self._block_s(gpu, counts_E[[t.expert for t in transfers]])
            for transfer, seconds in zip(transfers, block_s.tolist(), strict=True):
                missed.append((gpu, seconds))
                self.heap.push(transfer.arrival_s, EXTRA, server, len(missed))
        state.pending = len(missed)
        if not missed:
            self.next_layer(server)

    def _block_s(self, gpu: int, counts: np.ndarray) -> np.ndarray:
        return self.index.block_s(np.full(len(counts), gpu), counts)

    def other(self, time_s: float, server: int, item: int) -> None:
        if item >= _ADMIT:
            self.servers[server].promised -= 1
            self.admit(time_s, server, item - _ADMIT)
            return
        gpu, seconds = self._missed[server][item - 1]
        self.arrived(self.lines.compute(gpu, time_s, seconds, "loaded"), server)

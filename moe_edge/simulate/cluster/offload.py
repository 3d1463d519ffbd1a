"""Servers that load the blocks they lack from host memory, instead of asking others.

Without a placement a server serves alone: MoE-Infinity, the baseline of Prism's table
I. Every GPU has a slot cache over all layers that starts empty, run by the engine's own
`LayerStep` over a queue in computed time; block e belongs to GPU e mod G of its
server. What a layer misses travels over the host link of its GPU, one block after
another and before prefetches, and is computed as it comes.

With a placement, what it gives a server stays there and is computed where it is; the
cache has the rest of each GPU's memory, for what the server lacks.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.offload.block_queue import BlockQueue
from moe_edge.offload.computed_carrier import ComputedCarrier
from moe_edge.offload.computed_visit import pass_layer
from moe_edge.offload.evict_base import EVICTIONS, CacheSpec, Eviction
from moe_edge.offload.layer_step import LayerStep
from moe_edge.offload.link import EmulatedLink
from moe_edge.offload.slot_cache import SlotCache
from moe_edge.predict.base import PREDICTORS, Predictor
from moe_edge.simulate.cluster.calls import StepCalls
from moe_edge.simulate.cluster.drive import END, LAYER, LOADED, ROUTE
from moe_edge.simulate.cluster.links import Links


@dataclasses.dataclass(frozen=True)
class OffloadPolicy:
    """How a server loads what it lacks.

    Attributes:
      eviction, predictor: the engine's: names, classes or objects, that need nothing
        but the experts chosen, which is all that a simulated request has.
      horizon, prefetch_limit: see `LayerStep`.
      share: of the memory for experts that the cache has; the rest is the placement's.
    """

    eviction: str | Eviction | type[Eviction] = "moe_infinity"
    predictor: str | Predictor | type[Predictor] = "moe_infinity"
    horizon: int = 1
    prefetch_limit: int = 8
    share: float = 1.0

    def __post_init__(self):
        if not 0 < self.share <= 1:
            raise ConfigError(f"cache share must lie in (0, 1], got {self.share}")
        for kinds, given in self._given:
            kind = kinds.class_of(given)
            if more := sorted(kind.needs - {"ids"}):
                raise ConfigError(
                    f"{kinds.kind} {kind.name} needs {', '.join(more)}, and requests "
                    "in computed time have the experts chosen alone; use another one"
                )
        self.make()

    @property
    def _given(self):
        return (EVICTIONS, self.eviction), (PREDICTORS, self.predictor)

    def make(self) -> tuple[Eviction, Predictor]:
        """Fresh ones; an object is used itself."""
        return tuple(kinds.make(given, {}) for kinds, given in self._given)

    def cached(self, slots: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Slots of the cache on each GPU of every server, of so many in all."""
        return [np.ceil(self.share * slots_G).astype(np.int64) for slots_G in slots]

    def placed(self, slots: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Slots that are left for the placement."""
        cached = self.cached(slots)
        return [all_G - own_G for all_G, own_G in zip(slots, cached, strict=True)]


class HostLink(EmulatedLink):
    """A host link of the cluster, which migration may use too."""

    def __init__(self, links: Links, gpu: int):
        self._free, self._gpu = links.host_free, gpu
        link = links.host_links[gpu]
        # Blocks of a GPU's share of a layer are no neighbours, and migration's come in
        # between: each travels alone.
        super().__init__(link.bytes_per_s, link.latency_s, merges=False)

    @property
    def free_s(self) -> float:
        """When the link is free, whoever uses it."""
        return self._free[self._gpu]

    @free_s.setter
    def free_s(self, free_s: float) -> None:
        self._free[self._gpu] = free_s


class CountedCarrier(ComputedCarrier):
    """Tells the cluster what it carries."""

    def __init__(self, links: Links, gpu: int, block_bytes: int, num_experts: int):
        self._links, self._gpu = links, gpu
        super().__init__(HostLink(links, gpu), block_bytes, num_experts)

    def _carried(self, run, start_s: float, end_s: float) -> None:
        super()._carried(run, start_s, end_s)
        self._links.loaded(
            self._gpu, start_s, self.transfer_s, self.block_bytes, run[0].cause
        )


class HostMemory:
    """Lets the servers of a `loop.ClusterLoop` load what they lack.

    Attributes:
      layer_steps: of every server's GPUs.
      placed_slots: of every server int64 [G], what is left for the placement.
    """

    def __init__(self, loop, policy: OffloadPolicy):
        self.loop, self.policy = loop, policy
        slots = loop.cost_model.cluster.slots(loop.block_bytes)
        self.placed_slots = policy.placed(slots)
        self.layer_steps: list[list[LayerStep]] = []
        self._carriers: list[CountedCarrier] = []  # of each GPU
        for server, cached_G in enumerate(policy.cached(slots)):
            layer = -(-loop.pools.num_experts // len(cached_G))  # a GPU's share of it
            if cached_G.min() < layer:
                raise CapacityError(
                    f"a GPU of server {server} holds {cached_G.min()} blocks that it "
                    f"loads; that needs room for its share of a layer, {layer}"
                )
            first = loop.first_gpu[server]
            self.layer_steps.append(
                [self._new_step(first + g, int(n)) for g, n in enumerate(cached_G)]
            )
        self._step = [0] * len(loop.servers)
        self._cells: list[np.ndarray | None] = [None] * len(loop.servers)
        self._missed: list[list[tuple[int, float]]] = [[] for _ in loop.servers]
        loop.handlers[ROUTE], loop.handlers[LOADED] = self._route, self._loaded

    def _new_step(self, gpu: int, slots: int) -> LayerStep:
        pools, policy = self.loop.pools, self.policy
        any_layer = (-1,) * min(slots, pools.num_blocks)
        spec = CacheSpec(pools.num_layers, pools.num_experts, pools.top_k, any_layer)
        eviction, predictor = policy.make()
        given = self.loop.links, gpu, self.loop.block_bytes, pools.num_experts
        self._carriers.append(CountedCarrier(*given))
        return LayerStep(
            SlotCache(spec, eviction),
            BlockQueue([self._carriers[gpu]]),
            predictor=predictor,
            horizon=policy.horizon,
            prefetch_limit=policy.prefetch_limit,
        )

    @property
    def hit_ratio(self) -> float | None:
        """Share of lookups that were there in time; None where all was placed."""
        counters = [step.counters[True] for steps in self.layer_steps for step in steps]
        hits, misses = (
            sum(getattr(c, n) for c in counters) for n in ("hits", "misses")
        )
        return hits / (hits + misses) if hits + misses else None

    def facts(self) -> dict[str, float | None]:
        """What a report says of a run that loaded blocks."""
        return {"hit_ratio": self.hit_ratio, "redirected": self.loop.passed_on}

    def catch_up(self, gpu: int, time_s: float) -> None:
        """Begins what the host link of a GPU was free for before `time_s`."""
        carrier = self._carriers[gpu]
        carrier.now_s = max(carrier.now_s, time_s)
        carrier.poll()

    def lacking_seconds(self) -> np.ndarray:
        """float64 [N, M]: a block that server N lacks, whoever else holds it."""
        mean_N = self.loop.cost_model.mean_load_s()
        return np.tile(mean_N[:, None], len(mean_N))

    def begin(self, server: int, cells: np.ndarray, fresh: bool) -> StepCalls:
        """What a step that begins asks for; all of it counts as local.

        Args:
          cells: int [T, L * K], layer * E + expert of every choice of every token.
          fresh: whether a request is in its first step.
        """
        if fresh:
            for layer_step in self.layer_steps[server]:
                layer_step.finish_sequences()
        self._step[server] += 1
        self._cells[server] = cells
        asked, counts = np.unique(cells, return_counts=True)
        return StepCalls(*([] for _ in range(6)), asked, counts, cells.size, 0, 0, [])

    def _route(self, time_s: float, server: int, _: int) -> None:
        """Routing of a layer is known."""
        state, pools = self.loop.servers[server], self.loop.pools
        E, K, layer = pools.num_experts, pools.top_k, state.layer
        layer_steps, missed = self.layer_steps[server], self._missed[server]
        ids_TK = self._cells[server][:, layer * K : (layer + 1) * K] - layer * E
        counts_E = np.bincount(ids_TK.reshape(-1), minlength=E)
        missed.clear()
        state.end_s = time_s
        owner_E = np.arange(E) % len(layer_steps)
        if self.loop.table is not None:
            first = self.loop.first_gpu[server]
            gpu_E = self.loop.table.gpu_NX[server, layer * E : (layer + 1) * E]
            for g in range(len(layer_steps)):
                held_E = gpu_E == first + g
                self._compute(time_s, server, first + g, counts_E * held_E)
            owner_E[gpu_E >= 0] = -1
        for g, layer_step in enumerate(layer_steps):
            gpu = self.loop.first_gpu[server] + g
            mine_TK = np.where(owner_E[ids_TK] == g, ids_TK, E).astype(np.int32)
            self._carriers[gpu].now_s = time_s
            visit = pass_layer(layer_step, layer, mine_TK, None, self._step[server])
            transfers, here_E = visit.transfers, np.zeros(E, bool)
            here_E[visit.hits] = True
            self._compute(time_s, server, gpu, counts_E * here_E)
            block_s = self._block_s(gpu, counts_E[[t.expert for t in transfers]])
            for transfer, seconds in zip(transfers, block_s.tolist(), strict=True):
                self.loop.heap.push(transfer.arrival_s, LOADED, server, len(missed))
                missed.append((gpu, seconds))
        state.pending = len(missed)
        if not missed:
            self._next_layer(server)

    def _compute(self, time_s: float, server: int, gpu: int, counts_E) -> None:
        """Blocks that are on a GPU now, over so many tokens each."""
        counts = counts_E[counts_E > 0]
        if len(counts):
            state = self.loop.servers[server]
            seconds = float(self._block_s(gpu, counts).sum())
            end_s = self.loop.links.compute(gpu, time_s, seconds, "experts")
            state.end_s = max(state.end_s, end_s)

    def _block_s(self, gpu: int, counts: np.ndarray) -> np.ndarray:
        return self.loop.index.block_s(np.full(len(counts), gpu), counts)

    def _loaded(self, time_s: float, server: int, item: int) -> None:
        """A missed block has come and is computed."""
        gpu, seconds = self._missed[server][item]
        state = self.loop.servers[server]
        end_s = self.loop.links.compute(gpu, time_s, seconds, "loaded")
        state.end_s = max(state.end_s, end_s)
        state.pending -= 1
        if not state.pending:
            self._next_layer(server)

    def _next_layer(self, server: int) -> None:
        """Everything of a layer is there: the next one, or the end of the step."""
        state = self.loop.servers[server]
        state.layer += 1
        kind = LAYER if state.layer < self.loop.pools.num_layers else END
        self.loop.heap.push(state.end_s, kind, server)

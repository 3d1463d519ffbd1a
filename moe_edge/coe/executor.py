"""An executor of experts: moves their weights, computes batches and judges.

Weights come from the disk, where their files are mapped and which all executors share,
or from the host tier, into the executor's pool, an array of its device each. An
architecture is one program for all its experts and powers of two of images.
"""

import functools
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from moe_edge.coe.models import Network, get_network
from moe_edge.coe.serving import Batch
from moe_edge.coe.store import ExpertStore
from moe_edge.core.checks import MoeEdgeError
from moe_edge.offload.link import Link
from moe_edge.offload.pool_slots import PoolSlots, to_host
from moe_edge.offload.transfer_queue import TransferQueue
from moe_edge.workload.coe_graph import CoeGraph

Held = MutableMapping[int, np.ndarray | jax.Array]  # expert -> weights in host memory


class Outcome(NamedTuple):
    """What became of a batch.

    Attributes:
      load_s: seconds until its expert was there.
      judged: verdict and scores of each job; None: the expert could not be loaded.
      reason: why not.
    """

    load_s: float
    judged: Sequence[tuple[str, Any]] | None
    reason: str = ""


class Programs:
    """The compiled networks of one device.

    Attributes:
      graph: of the experts; device: where they compute.
      networks: of each architecture.
    """

    def __init__(self, graph: CoeGraph, device: jax.Device):
        self.graph, self.device = graph, device
        used = {expert.architecture for expert in graph.experts}
        self.networks: Mapping[str, Network] = {
            name: get_network(graph.architectures[name]) for name in sorted(used)
        }
        self._jitted = {name: jitted(one) for name, one in self.networks.items()}

    def outputs(
        self, expert: int, words_W: jax.Array, images: Sequence[np.ndarray]
    ) -> np.ndarray:
        """Outputs [N, O] of N images, padded to a power of two."""
        images_NHWC = np.zeros((bucket(len(images)), *images[0].shape), np.float32)
        np.stack(images, out=images_NHWC[: len(images)])
        name = self.graph.experts[expert].architecture
        outputs = self._jitted[name](words_W, images_NHWC)
        return np.asarray(outputs)[: len(images)]

    def network(self, expert: int) -> Network:
        """Of an expert."""
        return self.networks[self.graph.experts[expert].architecture]

    def warm_up(self, store: ExpertStore, max_batch: Mapping[str, int]) -> None:
        """Compiles what a run needs.

        Args:
          max_batch: of each architecture.
        """
        of = {e.architecture: number for number, e in enumerate(self.graph.experts)}
        for name, expert in of.items():
            words_W = self.network(expert).words(store.record(expert))
            words_W = jax.device_put(words_W, self.device)
            image = np.zeros(self.networks[name].input_shape, np.float32)
            for n in buckets(max_batch[name]):
                self.outputs(expert, words_W, [image] * n)

    @property
    def compiled(self) -> int:
        """How many programs of its networks there are, on all devices."""
        return sum(program._cache_size() for program in self._jitted.values())


@functools.cache
def jitted(network: Network) -> Callable[..., jax.Array]:
    """The program of a network, the same for all that ask."""
    return jax.jit(network.apply)


def bucket(n: int) -> int:
    """The power of two from n on."""
    return 1 << (n - 1).bit_length()


def buckets(most: int) -> list[int]:
    """The powers of two that batches up to `most` are padded to."""
    return [1 << power for power in range((most - 1).bit_length() + 1)]


class _Disk:
    """The store as the mover sees it: one layer of experts."""

    subs = 1

    def __init__(self, programs: Programs, store: ExpertStore | None):
        self._programs, self._store = programs, store
        self._sizes = programs.graph.bytes_E.tolist()
        self.num_experts, self.block_bytes = len(self._sizes), max(self._sizes)

    def num_bytes(self, layer: int, expert: int) -> int:
        return self._sizes[expert]

    def record(self, layer: int, expert: int) -> np.ndarray | jax.Array:
        return self._programs.network(expert).words(self._store.record(expert))

    source = record


class _Tier(_Disk):
    """The host tier as the mover sees it: what it moves is there no more."""

    def __init__(self, programs: Programs, held: Held):
        super().__init__(programs, None)
        self._held = held

    def record(self, layer: int, expert: int) -> np.ndarray | jax.Array:
        return self._held.pop(expert)

    source = record


class Executor:
    """One lane's: the weights of its pool, on its device. Of a run it is used by the
    lane's thread only.

    Args:
      programs: of its device; store: of all weights.
      links: to its pool from each tier, `disk` and `host`.
      held: weights in the host tier; None: there is none.
    """

    def __init__(
        self,
        programs: Programs,
        store: ExpertStore,
        links: Mapping[str, Link],
        held: Held | None = None,
    ):
        self._programs, self._held = programs, held
        self.slots = PoolSlots(len(programs.graph.experts), programs.device)
        sources = {"disk": _Disk(programs, store)}
        if held is not None:
            sources["host"] = _Tier(programs, held)
        self.movers = {
            tier: TransferQueue(source, self.slots, links[tier], asynchronous=False)
            for tier, source in sources.items()
        }

    def fill(self, experts: Iterable[int]) -> None:
        """Puts experts into the pool before a run, and in no time."""
        for expert in experts:
            self.slots.write(expert, self.movers["disk"].store.record(0, expert))

    def run(self, batch: Batch, images: Sequence[np.ndarray]) -> Outcome:
        """Loads a batch's expert if it is not resident, computes and judges."""
        began_s, expert = time.perf_counter(), batch.expert
        self._throw_away(batch)
        if batch.tier is not None:
            try:
                self.movers[batch.tier].request(0, expert, expert, "demand")
            except (OSError, MoeEdgeError) as error:
                return Outcome(time.perf_counter() - began_s, None, str(error))
        load_s = time.perf_counter() - began_s
        outputs = self._programs.outputs(expert, self.slots.arrays[expert], images)
        return Outcome(load_s, self._programs.network(expert).judge(outputs))

    def _throw_away(self, batch: Batch) -> None:
        for expert in batch.leaving:
            left_B = self.slots.take(expert)
            if self._held is not None:
                self._held[expert] = to_host(left_B)
        if self._held is not None:
            for expert in batch.dropped:
                del self._held[expert]

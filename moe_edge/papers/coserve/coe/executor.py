"""An executor of experts: moves their weights, computes batches and judges.

Weights come from the disk, where their files are mapped and which all executors share,
or from the host tier, into the executor's pool, an array of its device each. An
architecture is one program for all its experts and powers of two of images.
"""

import contextlib
import functools
import time
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any, NamedTuple

import jax
import numpy as np

from moe_edge.core.checks import CapacityError, CheckpointError, MoeEdgeError
from moe_edge.core.progress import progress, say
from moe_edge.offload.link import TransferLink
from moe_edge.offload.real_carrier import CallerCarrier
from moe_edge.offload.transfer_queue import TransferQueue
from moe_edge.papers.coserve.coe.models import Network, get_network
from moe_edge.papers.coserve.coe.profile import bucket, buckets
from moe_edge.papers.coserve.coe.serving import Batch
from moe_edge.papers.coserve.coe.store import ExpertStore
from moe_edge.papers.coserve.memory.pool_slots import PoolSlots, to_host
from moe_edge.papers.coserve.workload.coe_graph import CoeGraph

LESS = (
    "pools and batches take more than there is; give less --memory or fewer --executors"
)
FULL = "RESOURCE_EXHAUSTED"  # what XLA's errors begin with where memory is full
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
        for name, expert in progress(of.items(), "compiling networks"):
            words_W = self.network(expert).words(store.record(expert))
            words_W = jax.device_put(words_W, self.device)
            image = np.zeros(self.networks[name].input_shape, np.float32)
            for n in buckets(max_batch[name]):
                with memory_for(f"a batch of {n} images of {name}", self.device):
                    self.outputs(expert, words_W, [image] * n)

    @property
    def compiled(self) -> int:
        """How many programs of its networks there are, on all devices."""
        return sum(program._cache_size() for program in self._jitted.values())


@functools.cache
def jitted(network: Network) -> Callable[..., jax.Array]:
    """The program of a network, the same for all that ask."""
    return jax.jit(network.apply)


@contextlib.contextmanager
def memory_for(what: str, device: jax.Device, mend: str = LESS) -> Iterator[None]:
    """Raises CapacityError where memory runs out, of the device or of the host.

    Args:
      what: was to be there; mend: what to do then.
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and FULL not in str(error):
            raise
        raise CapacityError(f"no memory left for {what} on {device}: {mend}") from error


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


class _ColdDisk(_Disk):
    """As `_Disk`, but what is moved comes from there and not from the system's cache,
    as in the profile."""

    def record(self, layer: int, expert: int) -> np.ndarray | jax.Array:
        self._store.forget(expert)
        return super().record(layer, expert)

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
      links: to its pool from each tier, `disk` and `host`, of each architecture.
      held: weights in the host tier; None: there is none.
      cold: the system is asked to forget a file before each load.
    """

    def __init__(
        self,
        programs: Programs,
        store: ExpertStore,
        links: Mapping[str, Mapping[str, TransferLink]],
        held: Held | None = None,
        cold: bool = False,
    ):
        self._programs, self._held = programs, held
        self.slots = PoolSlots(len(programs.graph.experts), programs.device)
        self._disk = _Disk(programs, store)
        sources = {"disk": _ColdDisk(programs, store) if cold else self._disk}
        if held is not None:
            sources["host"] = _Tier(programs, held)
        self.movers = {
            (tier, name): TransferQueue(
                [CallerCarrier(source, self.slots, link, serial=True)]
            )
            for tier, source in sources.items()
            for name, link in links[tier].items()
        }

    def fill(self, experts: Iterable[int]) -> list[int]:
        """Puts experts into the pool before a run, and in no time.

        Returns:
          those that cannot be read any more.
        Raises:
          CapacityError: they do not fit.
        """
        lost = []
        for expert in experts:
            with memory_for(self._name(expert), self._programs.device):
                try:
                    record = self._disk.record(0, expert)
                except CheckpointError as error:
                    say(f"not in a pool at the start: {error}")
                    lost.append(expert)
                    continue
                self.slots.write(expert, record)
        return lost

    def run(self, batch: Batch, images: Sequence[np.ndarray]) -> Outcome:
        """Loads a batch's expert if it is not resident, computes and judges.

        Raises:
          CapacityError: there is not as much memory as pools and batches may take.
        """
        what = f"{self._name(batch.expert)} and a batch of {len(images)} images"
        with memory_for(what, self._programs.device):
            return self._run(batch, images)

    def _run(self, batch: Batch, images: Sequence[np.ndarray]) -> Outcome:
        began_s, expert = time.perf_counter(), batch.expert
        self._throw_away(batch)
        if batch.tier is not None:
            architecture = self._programs.graph.experts[expert].architecture
            mover = self.movers[batch.tier, architecture]
            try:
                mover.request(0, expert, expert, "demand")
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

    def _name(self, expert: int) -> str:
        return f"expert {self._programs.graph.experts[expert].id!r}"

"""Measures what experts cost on the devices at hand: a `coe_profile.json`.

One expert stands for its architecture, whose program is the same for all. Times are
medians of rounds in which every size of batch is run once, forwards and backwards in
turn, so that a slow moment of the machine does not meet one size only.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moe_edge.core.checks import ConfigError, check_count, check_positive
from moe_edge.core.heap import keep_heap
from moe_edge.core.progress import progress
from moe_edge.papers.coserve.coe.executor import Programs, jitted, memory_for
from moe_edge.papers.coserve.coe.profile import ArchitectureCosts, Devices
from moe_edge.papers.coserve.coe.store import CAN_FORGET, ExpertStore, forget
from moe_edge.papers.coserve.memory.pool_slots import PoolSlots, to_host
from moe_edge.papers.coserve.workload.coe_graph import CoeGraph

SOURCE = "CoServe (ASPLOS 2025), section 4.5"
LOADED = 4  # experts of an architecture that are read to time loads


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileSizes:
    """How much is measured.

    Attributes:
      most_batch: largest batch that is tried; sizes are powers of two.
      repeats: rounds behind each median.
      margin: by so much less an image has to take in a larger batch for that to pay.
    """

    most_batch: int = 32
    repeats: int = 9
    margin: float = 0.05

    def __post_init__(self):
        check_count("most_batch", self.most_batch)
        check_count("repeats", self.repeats)
        check_positive("margin", self.margin)
        if self.margin >= 1:
            raise ConfigError(f"margin is {self.margin}, expected a share below 1")

    @property
    def batches(self) -> list[int]:
        """1, 2, 4, ... up to `most_batch`."""
        return [2**n for n in range(self.most_batch.bit_length())]


@dataclasses.dataclass(frozen=True)
class Profiled:
    """An architecture on a device.

    Attributes:
      costs: what is stored; times_s: batch -> seconds of each round.
      bytes: batch -> memory beside the weights.
      notes: where numbers come from.
    """

    costs: ArchitectureCosts
    times_s: Mapping[int, Sequence[float]]
    bytes: Mapping[int, int]
    notes: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """What was measured, for people."""
        batches = [
            {
                "batch": n,
                "median_s": statistics.median(found),
                "half_range_s": float(np.ptp(found)) / 2,
                "line_s": self.costs.k_s * n + self.costs.b_s,
                "bytes": self.bytes[n],
            }
            for n, found in self.times_s.items()
        ]
        return {"batches": batches, **self.notes}


def device_of(kind: str) -> jax.Device:
    """What executors of a kind compute on: `cpu`, or what else there is."""
    return jax.local_devices(backend="cpu" if kind == "cpu" else None)[0]


def profile_graph(
    graph: CoeGraph,
    store: ExpertStore,
    devices: Mapping[str, jax.Device],
    sizes: ProfileSizes | None = None,
) -> Devices:
    """Costs of all architectures that experts have, on each kind of device.

    Args:
      store: of their weights.
      devices: kind of executor -> a device of that kind.
    Raises:
      CheckpointError: weights are missing or of another size.
    """
    found = profile_all(graph, store, devices, sizes)
    return {
        kind: {name: one.costs for name, one in each.items()}
        for kind, each in found.items()
    }


def profile_all(
    graph: CoeGraph,
    store: ExpertStore,
    devices: Mapping[str, jax.Device],
    sizes: ProfileSizes | None = None,
) -> dict[str, dict[str, Profiled]]:
    """As `profile_graph`, with all that was measured."""
    keep_heap()  # as engines do: else page faults are measured
    experts: dict[str, list[int]] = {}
    for number, expert in enumerate(graph.experts):
        experts.setdefault(expert.architecture, []).append(number)
    return {
        kind: {
            name: profile_architecture(graph, store, numbers, device, sizes)
            for name, numbers in experts.items()
        }
        for kind, device in devices.items()
    }


def profile_architecture(
    graph: CoeGraph,
    store: ExpertStore,
    experts: Sequence[int],
    device: jax.Device,
    sizes: ProfileSizes | None = None,
) -> Profiled:
    """One architecture on one device.

    Args:
      experts: numbers of the experts that have it.
    """
    sizes = sizes or ProfileSizes()
    architecture = graph.architectures[graph.experts[experts[0]].architecture]
    programs, record_B = Programs(graph, device), store.record(experts[0])
    what = f"batches of {sizes.most_batch} images"
    with memory_for(what, device, "profile smaller ones (--most_batch)"):
        times_s, bytes_, note = time_batches(programs, experts[0], record_B, sizes)
    medians_s = {n: statistics.median(found) for n, found in times_s.items()}
    most = largest_batch(medians_s, sizes.margin)
    k_s, b_s, r2 = fit_line({n: s for n, s in medians_s.items() if n <= most})
    paths = [store.path(e) for e in experts[:LOADED]]
    load_s, loads = time_loads(paths, device, sizes.repeats)
    costs = ArchitectureCosts(
        *(k_s, b_s, most, math.ceil(bytes_[most] / most)),
        record_bytes=architecture.record_bytes,
        load_s=load_s,
        r2=r2,
    )
    return Profiled(costs, times_s, bytes_, {"item_bytes": note, "load_s": loads})


def time_batches(
    programs: Programs, expert: int, record_B: np.ndarray, sizes: ProfileSizes
) -> tuple[dict[int, list[float]], dict[int, int], str]:
    """Seconds and memory of batches, from images on the host to their verdicts.

    Args:
      programs: which executors run, too: nothing is compiled for the profile alone.
    Returns:
      batch -> seconds of each round; batch -> bytes; and where the bytes come from.
    """
    network, rng = programs.network(expert), np.random.default_rng(0)
    words_W = jax.device_put(network.words(record_B), programs.device)
    bytes_, note = {}, "temporary, input and output bytes of the compiled program"
    images = [
        rng.random(network.input_shape, np.float32) for _ in range(sizes.most_batch)
    ]

    def run(n: int) -> float:
        started_s = time.perf_counter()
        network.judge(programs.outputs(expert, words_W, images[:n]))
        return time.perf_counter() - started_s

    for n in progress(sizes.batches, "compiling sizes of batches"):
        compiled = jitted(network).lower(words_W, np.stack(images[:n])).compile()
        told = compiled.memory_analysis()
        outputs = jax.tree.leaves(compiled.out_info)
        bytes_[n] = n * images[0].nbytes + sum(_num_bytes(one) for one in outputs)
        if told is None:
            note = "input and output bytes only: this device reports no more"
        else:
            bytes_[n] += told.temp_size_in_bytes
    return in_rounds(run, sizes.batches, sizes.repeats), bytes_, note


def _num_bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def in_rounds(
    run: Callable[[int], float], cases: Sequence[int], repeats: int
) -> dict[int, list[float]]:
    """What each case gave, one value a round, after one that is not kept."""
    found: dict[int, list[float]] = {case: [] for case in cases}
    for number in progress(range(repeats + 1), "rounds timed"):
        for case in cases if number % 2 == 0 else reversed(cases):
            value = run(case)
            if number:
                found[case].append(value)
    return found


def largest_batch(medians_s: Mapping[int, float], margin: float) -> int:
    """The smallest batch that no larger one beats by more than the margin, an image."""
    each_s = {n: seconds / n for n, seconds in medians_s.items()}
    for n, seconds in sorted(each_s.items()):
        if all(s >= (1 - margin) * seconds for m, s in each_s.items() if m > n):
            return n
    raise ConfigError("no batch was measured; expected at least one")


def fit_line(medians_s: Mapping[int, float]) -> tuple[float, float, float]:
    """K, B and r2 of K n + B through the times of batches.

    Each batch counts by its relative error: else the largest would decide alone. B is
    not below 0. Of one point the line goes through the origin.
    """
    n = np.array(list(medians_s), float)
    seconds = np.array(list(medians_s.values()))
    if len(n) == 1:
        return float(seconds[0] / n[0]), 0.0, 1.0
    columns = np.stack([n, np.ones_like(n)], 1) / seconds[:, None]
    (k_s, b_s), *_ = np.linalg.lstsq(columns, np.ones_like(n))
    if b_s < 0 or k_s <= 0:
        column = n / seconds
        k_s, b_s = column.sum() / (column @ column), 0.0
    missed = seconds - (k_s * n + b_s)
    spread = seconds - seconds.mean()
    return float(k_s), float(b_s), float(1 - missed @ missed / (spread @ spread))


def time_loads(
    paths: Sequence[Path], device: jax.Device, repeats: int
) -> tuple[dict[str, float], str]:
    """Median seconds of a load of one record into a pool, from disk and from memory.

    As executors load: a mapped file is copied; what a pool gave to the host tier comes
    back by a copy too, unless the device is the host.

    Returns:
      tier -> seconds; and whether the disk was read or the system's cache.
    """
    slots = PoolSlots(len(paths), device)

    def from_disk(number: int) -> float:
        forget(paths[number])
        return write(number, np.memmap(paths[number], np.uint8, mode="r"))

    def from_host(number: int) -> float:
        return write(number, to_host(slots.take(number)))

    def write(number: int, record: np.ndarray | jax.Array) -> float:
        started_s = time.perf_counter()
        slots.write(number, record)
        return time.perf_counter() - started_s

    numbers = range(len(paths))
    disk = in_rounds(from_disk, numbers, repeats)
    host = in_rounds(from_host, numbers, repeats)
    note = "disk: the file, after the system was asked to forget it"
    if not CAN_FORGET:
        note = "disk: the file, which the system may hold in memory"
    if device.platform == "cpu":
        note += "; host: nothing is copied, as the device is the host"
    middle = {
        tier: statistics.median(sum(found.values(), []))
        for tier, found in (("disk", disk), ("host", host))
    }
    return middle, note

"""Runs of the networks of boards and of the paper's sizes, for figures 1, 5, 6, 12."""

import dataclasses
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from moe_edge.bench.derived import spans
from moe_edge.core.heap import keep_heap
from moe_edge.metrics.frames import Rows, Tables, median
from moe_edge.papers.coserve.coe.models import get_network, make_architecture
from moe_edge.papers.coserve.coe.profiler import (
    Profiled,
    ProfileSizes,
    device_of,
    profile_architecture,
)
from moe_edge.papers.coserve.coe.store import ExpertStore, write_experts
from moe_edge.papers.coserve.studies.measured import NETWORKS, Measured
from moe_edge.papers.coserve.workload.coe_graph import CoeGraph, Expert

OUTPUTS = {"board_detector": ("ok", "misaligned", "wrong_polarity")}
Found = Mapping[tuple[str, str], Profiled]  # (network, kind of device)


def write_networks(folder: Path, settings: Measured) -> CoeGraph:
    """A graph of `files` experts a network with random weights, and their files."""
    architectures, experts = {}, []
    for name in settings.networks:
        side, dtype, _ = NETWORKS[name]
        outputs = OUTPUTS.get(name, ("ok", "damaged"))
        architecture = make_architecture(name, {}, (side, side, 3), outputs, dtype)
        architectures[name] = architecture
        for number in range(settings.files):
            file = f"{name}_{number}.bin"
            record_B = get_network(architecture).init(number)
            sha256 = write_experts(folder, {file: record_B})[file]
            experts.append(Expert(f"{name}_{number}", name, file, sha256))
    rules = {f"component_{n}": n for n in range(len(experts))}
    return CoeGraph(architectures, experts, rules, {})


def profile_networks(settings: Measured) -> tuple[CoeGraph, Found]:
    """Every network on every kind of device that there is."""
    keep_heap()
    found = {}
    kinds = ["cpu"] if jax.default_backend() == "cpu" else ["gpu", "cpu"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(settings.work_dir or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        graph = write_networks(folder, settings)
        store = ExpertStore(graph, folder)
        for name in settings.networks:
            of = [n for n, e in enumerate(graph.experts) if e.architecture == name]
            for kind in kinds:
                device, sizes = device_of(kind), _sizes(name, settings)
                one = profile_architecture(graph, store, of, device, sizes)
                found[name, kind] = one
                print(f"{name}, {kind}: {one.costs}", flush=True)
    return graph, found


def _sizes(name: str, settings: Measured) -> ProfileSizes:
    if NETWORKS[name][2]:
        given = settings.large_batch, settings.large_repeats
    else:
        given = settings.small_batch, settings.small_repeats
    return ProfileSizes(most_batch=given[0], repeats=given[1])


def measure_batches(settings: Measured, rows: Rows) -> None:
    """Latency and memory by size of batch, and the line through the latencies."""
    graph, found = profile_networks(settings)
    for (network, kind), one in found.items():
        costs, (item_bytes, batch_bytes) = one.costs, memory_line(one)
        group = "the paper's sizes" if NETWORKS[network][2] else "networks of boards"
        for n, times_s in one.times_s.items():
            image_ms, memory = median(times_s, scale=1e3 / n), one.bytes[n]
            at = group, network, kind, n
            rows("batches", *at, image_ms=image_ms, memory_bytes=memory)
        rows(
            "networks",
            *(network, kind),
            **_line(one),
            line_miss=line_error(one),
            best_batch=costs.max_batch,
            image_bytes=item_bytes,
            batch_bytes=batch_bytes,
            image_experts=item_bytes / costs.record_bytes,
        )
    _tell(rows, settings, graph, found)


def derive_batches(tables: Tables) -> dict[str, Any]:
    """Spans over the networks."""
    networks = tables["networks"]
    return {
        "least_r2": networks.r2.min(),
        "largest_miss": networks.line_miss.abs().max(),
        "best": [networks.best_batch.min(), networks.best_batch.max()],
        "memory": [networks.image_experts.min(), networks.image_experts.max()],
    }


def measure_switches(settings: Measured, rows: Rows) -> None:
    """Share of a load in the latency of one request."""
    graph, found = profile_networks(settings)
    for at, one in found.items():
        run_s = statistics.median(one.times_s[1])
        shares = {
            f"share_{tier}": load_s / (load_s + run_s)
            for tier, load_s in one.costs.load_s.items()
        }
        rows("networks", *at, image_ms=1e3 * run_s, **_line(one), **shares)
    _tell(rows, settings, graph, found)


def derive_switches(tables: Tables) -> dict[str, Any]:
    """Spans over the networks, and the shares by tier."""
    tiers = {"share_disk": "disk", "share_host": "host"}
    networks = tables["networks"].rename(columns=tiers)
    share = networks.melt(["network"], tiers.values(), "tier", "share")
    return {"share": share, "spans": spans(share, "share", "tier")}


def _line(one: Profiled) -> dict[str, float]:
    """The line through the latencies of batches, and loads."""
    costs = one.costs
    found = {"k_ms": 1e3 * costs.k_s, "b_ms": 1e3 * costs.b_s, "r2": costs.r2}
    found["record_bytes"] = costs.record_bytes
    return found | {f"load_{tier}_ms": 1e3 * s for tier, s in costs.load_s.items()}


def memory_line(one: Profiled) -> tuple[float, float]:
    """Bytes of one image more, and of a batch beside its images."""
    low, high = min(one.bytes), max(one.bytes)
    if low == high:
        return float(one.bytes[low]) / low, 0.0
    each = (one.bytes[high] - one.bytes[low]) / (high - low)
    return each, one.bytes[low] - each * low


def line_error(one: Profiled) -> float:
    """Largest relative miss of the line, over batches that pay; with its sign."""
    costs = one.costs
    misses = [
        (costs.k_s * n + costs.b_s) / statistics.median(found) - 1
        for n, found in one.times_s.items()
        if n <= costs.max_batch
    ]
    return max(misses, key=abs)


def _tell(rows: Rows, settings: Measured, graph: CoeGraph, found: Found) -> None:
    notes = sorted({note for one in found.values() for note in one.notes.values()})
    params = {
        name: sum(t.size for t in get_network(one).tensors)
        for name, one in graph.architectures.items()
    }
    told = {"work_dir": None, "sources": notes}
    rows.about |= {
        "model": {"name": ", ".join(params), "params": params, "weights": "random"},
        "workload": dataclasses.asdict(settings) | told,
    }

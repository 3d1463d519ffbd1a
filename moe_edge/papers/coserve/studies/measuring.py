"""Runs of the networks of boards and of the paper's sizes, for figures 1, 5, 6, 12."""

import dataclasses
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from moe_edge.bench.study import SPREAD, Findings
from moe_edge.core.heap import keep_heap
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.metrics.results import metric
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
                print(f"{name}, {kind}: {_line(one)}", flush=True)
    return graph, found


def _sizes(name: str, settings: Measured) -> ProfileSizes:
    if NETWORKS[name][2]:
        given = settings.large_batch, settings.large_repeats
    else:
        given = settings.small_batch, settings.small_repeats
    return ProfileSizes(most_batch=given[0], repeats=given[1])


def measure_batches(settings: Measured) -> Findings:
    """Latency and memory by size of batch, and the line through the latencies."""
    graph, found = profile_networks(settings)
    rows = [row for at, one in found.items() for row in batch_rows(at, one)]
    worst = max(abs(line_error(one)) for one in found.values())
    best = {_name(at): one.costs.max_batch for at, one in found.items()}
    share = {
        _name(at): memory_line(one)[0] / one.costs.record_bytes
        for at, one in found.items()
    }
    r2 = [one.costs.r2 for one in found.values()]
    return _findings(
        settings,
        graph,
        found,
        answer=f"K n + B describes batches with r2 of {min(r2):.3f} or more; up to "
        f"{min(best.values())} to {max(best.values())} images pay, and each takes the "
        f"memory of {min(share.values()):.2g} to {max(share.values()):.2g} experts.",
        details=[f"{_name(at)}: {_line(one)}." for at, one in found.items()],
        metrics=rows,
        ours={
            "best batch": best,
            "memory of an image, in experts": {
                k: round(v, 3) for k, v in share.items()
            },
            "largest miss of the line": round(worst, 3),
        },
        plot=lambda path: draw_panels(
            path, _batch_panels(found), title="Batches (measured)", columns=3
        ),
        summary={"best_batch": best, "line_error": worst},
    )


def measure_switches(settings: Measured) -> Findings:
    """Share of a load in the latency of one request."""
    graph, found = profile_networks(settings)
    rows, shares = [], {"disk": {}, "host": {}}
    for at, one in found.items():
        run_s = statistics.median(one.times_s[1])
        rows.append(metric(_name(at), "one image", 1e3 * run_s, "ms"))
        for tier, load_s in one.costs.load_s.items():
            share = load_s / (load_s + run_s)
            shares[tier][_name(at)] = share
            rows.append(metric(_name(at), f"load, {tier}", 1e3 * load_s, "ms"))
            rows.append(metric(_name(at), f"share of the load, {tier}", share, "1"))
    said = "; ".join(
        f"from {tier} {min(one.values()):.0%} to {max(one.values()):.0%}"
        for tier, one in shares.items()
    )
    names = list(shares["disk"])
    return _findings(
        settings,
        graph,
        found,
        answer=f"A load's share of the latency of one image: {said}.",
        details=[f"{_name(at)}: {_line(one)}." for at, one in found.items()],
        metrics=rows,
        ours={"share of the switch": shares},
        plot=lambda path: draw_panels(
            path,
            [
                Panel(
                    "Share of the load in a request's latency",
                    "1",
                    names,
                    {tier: [one[n] for n in names] for tier, one in shares.items()},
                )
            ],
            title="Switches (measured)",
        ),
        summary={"shares": shares},
    )


def batch_rows(at: tuple[str, str], one: Profiled) -> list[dict]:
    """Metric rows of a network on a device."""
    name, costs = _name(at), one.costs
    rows = []
    for n, found in one.times_s.items():
        spread = SPREAD, 1e3 * float(np.ptp(found)) / 2 / n
        value = 1e3 * statistics.median(found) / n
        rows.append(
            metric(name, f"an image, batch {n}", value, "ms", len(found), spread)
        )
        rows.append(metric(name, f"memory, batch {n}", one.bytes[n], "bytes"))
    return [
        *rows,
        metric(name, "K", 1e3 * costs.k_s, "ms"),
        metric(name, "B", 1e3 * costs.b_s, "ms"),
        metric(name, "r2", costs.r2, "1"),
        metric(name, "largest miss of the line", line_error(one), "1"),
        metric(name, "best batch", costs.max_batch, "1"),
        metric(name, "memory of one image more", memory_line(one)[0], "bytes"),
        metric(name, "memory of any batch", memory_line(one)[1], "bytes"),
    ]


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


def _batch_panels(found: Found) -> list[Panel]:
    """Time, memory and lines, of the small networks and of the large ones."""
    panels = []
    for large in (False, True):
        group = {at: one for at, one in found.items() if NETWORKS[at[0]][2] == large}
        if not group:
            continue
        x = list(next(iter(group.values())).times_s)
        label = "the paper's sizes" if large else "networks of boards"
        each, whole, memory = {}, {}, {}
        for at, one in group.items():
            times_ms = [1e3 * statistics.median(one.times_s[n]) for n in x]
            each[_name(at)] = [ms / n for ms, n in zip(times_ms, x, strict=True)]
            whole[_name(at)] = times_ms
            costs = one.costs
            whole[f"{_name(at)}, line"] = [1e3 * (costs.k_s * n + costs.b_s) for n in x]
            memory[_name(at)] = [one.bytes[n] / costs.record_bytes for n in x]
        of = {"x_label": "images of a batch"}
        panels += [
            Panel(f"{label}: an image", "ms", x, each, **of),
            Panel(f"{label}: a batch", "ms", x, whole, **of),
            Panel(f"{label}: memory of a batch", "experts", x, memory, **of),
        ]
    return panels


def _findings(settings: Measured, graph: CoeGraph, found: Found, **more) -> Findings:
    notes = sorted({note for one in found.values() for note in one.notes.values()})
    params = {
        name: sum(t.size for t in get_network(one).tensors)
        for name, one in graph.architectures.items()
    }
    return Findings(
        model={"name": ", ".join(params), "params": params, "weights": "random"},
        workload=dataclasses.asdict(settings) | {"work_dir": None, "sources": notes},
        limits=[
            "One machine; other programs may have shared it. Images are random numbers "
            f"of {_sides(settings.networks)} pixels; the paper does not say its sizes.",
            "Memory of a batch is what its program says, beside the weights; on a "
            "processor it may hold a copy of these. Batches are powers "
            "of two.",
            "A load from disk reads a file that the system was asked to forget; below "
            "a virtual machine a cache may still hold it. A processor computes with "
            "what its host tier holds, so that load copies nothing.",
        ],
        seeds=[0],
        **more,
    )


def _sides(networks: Sequence[str]) -> str:
    return ", ".join(f"{NETWORKS[n][0]} x {NETWORKS[n][0]} ({n})" for n in networks)


def _name(at: tuple[str, str]) -> str:
    return ", ".join(at)


def _line(one: Profiled) -> str:
    costs = one.costs
    load_ms = {tier: 1e3 * s for tier, s in costs.load_s.items()}
    item, fixed = (n / 1e6 for n in memory_line(one))
    return (
        f"{1e3 * costs.k_s:.3g} n + {1e3 * costs.b_s:.3g} ms (r2 {costs.r2:.4f}), up "
        f"to {costs.max_batch} pay; {item:.3g} n + {fixed:.3g} MB; loads of "
        f"{costs.record_bytes / 1e6:.3g} MB {load_ms['disk']:.3g} ms from disk, "
        f"{load_ms['host']:.3g} from memory"
    )

"""Rows of suite `placement` from the simulator: its speed, and what placements give.

Speed: 256 GPUs in 192 servers, requests of 64 prompt and 64 answer tokens that come at
random, 26 layers; processor seconds and peak memory of a process of its own. Latency:
mean seconds a request of our placer against the optimum of eq. 2 and EPLB for unequal
machines, one figure a seed; requests, routing and costs are the same for all. With
equal lines there is little to win over eq. 2: the row says how much.
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from moe_edge.bench.speed import Rows, SuiteSettings, make_row
from moe_edge.core.process import alone, peak_rss_bytes
from moe_edge.papers.prism.studies.runs import serve
from moe_edge.simulate.cluster.build import build_scenario
from moe_edge.simulate.cluster.loop import LoopOptions
from moe_edge.simulate.cluster.report import ClusterResult

OURS = "latency"
# Peer -> largest ratio of mean latencies that the bar allows on unequal machines, and
# on Prism's own. 0.694: 30.6 % less, as Prism reports against EPLB.
BARS = {"optimal": (0.9, None), "eplb_heterogeneous": (0.694, 0.694)}
MEMORY_BAR = 2e9
HELD_OUT_GPUS = (("rtx_3090",), ("a6000",), ("rtx_4080", "rtx_4060_ti"), ("rtx_4090",))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateSettings(SuiteSettings):
    """How much is simulated; `SuiteSettings` names the rest.

    Attributes:
      gpus, tokens: of the speed rows.
      speed: (requests, batch, seconds allowed or None) of each speed row.
      speed_methods: placers whose placements are run; "uniform" has hardly a local
        call, so it is the most work there is.
      requests_per_server, latency_seeds: of the latency rows.
    """

    gpus: int = 256
    tokens: int = 64
    speed: tuple[tuple[int, int, float | None], ...] = (
        (1_000, 1, 60.0),
        (10_000, 1, None),
    )
    speed_methods: tuple[str, ...] = ("prism", "uniform")
    requests_per_server: int = 100
    latency_seeds: int = 5


def on_mixed(expert_memory_share: float, **options) -> dict[str, Any]:
    """Options of `build_scenario`: unequal machines, with these options of theirs."""
    options = {"expert_memory_share": expert_memory_share, **options}
    return {"cluster": "mixed", "cluster_options": options}


SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "prism bigbench": {"cluster": "prism"},
    "mixed bigbench": on_mixed(0.6),
    "mixed tight bigbench": on_mixed(0.4),
    "mixed multidata": on_mixed(0.6) | {"workload": "multidata", "interval_s": 20.0},
    "mixed equal lines bigbench": on_mixed(0.6, slow_servers=()),
    # Machines (the A6000 on a slower line) and seeds that no option was chosen on.
    "held-out bigbench": on_mixed(
        0.4, gpus=HELD_OUT_GPUS, slow_servers=(1,), slow_mbps=200.0
    )
    | {"seed": 100},
}


def simulate_rows(sizes: SimulateSettings) -> Rows:
    """Speed rows, then latency rows."""
    rows = []
    for requests, batch, limit_s in sizes.speed:
        for method in sizes.speed_methods:
            # Ten times the largest case would say nothing new.
            if limit_s is not None or method != "uniform":
                rows += speed_rows(requests, batch, limit_s, method, sizes)
    for name, setting in SETTINGS.items():
        rows += latency_rows(name, setting, sizes)
    return rows


def speed_rows(
    requests: int,
    batch: int,
    limit_s: float | None,
    method: str,
    sizes: SimulateSettings,
) -> Rows:
    """Seconds and memory of one run, by itself."""
    runs = [
        alone(speed_run, requests, batch, method, sizes) for _ in range(sizes.repeats)
    ]
    case = f"{requests} requests {sizes.gpus} GPUs {method}"
    seconds, rss, events = (list(column) for column in zip(*runs, strict=True))
    each = [1e6 * s / e for s, e in zip(seconds, events, strict=True)]
    return [
        make_row(f"simulate/seconds {case}", seconds, "CPU s", limit=limit_s),
        make_row(f"simulate/memory {case}", rss, "bytes", limit=MEMORY_BAR),
        make_row(f"simulate/event {case}", each, "CPU us"),
    ]


def speed_run(
    requests: int, batch: int, method: str, sizes: SimulateSettings
) -> tuple[float, float, int]:
    """Processor seconds, peak bytes of this process, events."""
    case = build_scenario(
        cluster_options={"num_gpus": sizes.gpus},
        requests_per_server=-(-requests // (sizes.gpus // 4 * 3)),
        input_tokens=sizes.tokens,
        output_tokens=sizes.tokens,
        interval_s=8.0,
    )
    case = dataclasses.replace(case, requests=case.requests[:requests])
    loop = case.loop(method, LoopOptions(max_batch=batch))
    started = time.process_time()
    loop.run()
    seconds = time.process_time() - started
    ClusterResult(loop)
    return seconds, float(peak_rss_bytes()), loop.events


def latency_rows(
    name: str, setting: Mapping[str, Any], sizes: SimulateSettings
) -> Rows:
    """Our mean latency against each peer's; the ratio is what the bar is about."""
    means: dict[str, list[float]] = {method: [] for method in (OURS, *BARS)}
    first = setting.get("seed", 0)
    for seed in range(first, first + sizes.latency_seeds):
        count = sizes.requests_per_server
        case = build_scenario(**{**setting, "seed": seed}, requests_per_server=count)
        for method, found in means.items():
            found.append(serve(case, method, seed).mean_latency_s)
    unequal = setting["cluster"] == "mixed"
    return [
        make_row(
            f"latency/{OURS} {name} against {peer}",
            means[OURS],
            "s",
            peer=means[peer],
            peer_name=peer,
            bar=bars[0] if unequal else bars[1],
        )
        for peer, bars in BARS.items()
    ]

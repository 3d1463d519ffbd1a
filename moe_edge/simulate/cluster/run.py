"""The root of launch/simulate.py: what placements and offloading do to latency."""

import inspect
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.core.checks import ConfigError, check_count
from moe_edge.core.files import write_json
from moe_edge.core.run_folder import RunFolder, root
from moe_edge.place.policy import PLACERS, chosen
from moe_edge.simulate.cluster.build import build_case
from moe_edge.simulate.cluster.case import METHODS, Case
from moe_edge.simulate.cluster.loop import LoopOptions
from moe_edge.simulate.cluster.migration import check_rule
from moe_edge.simulate.cluster.report import (
    ClusterResult,
    print_table,
    progress,
    report,
    write_requests,
)
from moe_edge.simulate.cluster.timeline import write_timeline

# What makes a case, apart from where data lies and the seed.
CASE_OPTIONS = [
    name
    for name in inspect.signature(build_case).parameters
    if name not in ("data_dir", "seed")
]


@root
def run_simulate(
    run: RunFolder,
    *,
    model: str = "deepseek_v2_lite",
    cluster: str = "prism",
    cluster_options: Mapping[str, Any] | None = None,
    workload: str = "bigbench",
    then_workload: str | None = None,
    placed_for: str | None = None,
    arrivals: str = "poisson",
    interval_s: float | Sequence[float] | None = None,
    requests_per_server: int = 100,
    input_tokens: int | None = None,
    output_tokens: int | None = None,
    trace_speed: float = 1.0,
    most_tokens: int | None = None,
    skew: float = 1.0,
    correlated: bool = True,
    routing_trace: str | None = None,
    methods: str = "all",
    max_batch: int = 1,
    period_s: float = 300.0,
    keep: float = 1.0,
    hysteresis: float = 0.05,
    source: str = "host",
    window_s: float = 60.0,
    cache_share: float = 0.0,
    timeline_s: float = 0.0,
    seeds: int = 1,
    data_dir: str | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Serves the same requests by every method in computed time, and compares.

    Args:
      run: folder of `simulate.json`, `config.gin`, `requests_METHOD.csv` of the
        first seed and, with `timeline_s`, `timeline_METHOD.json` (Perfetto).
      model: preset of its sizes.
      cluster: preset of machines, such as prism or mixed.
      cluster_options: of the preset.
      workload: bigbench, multidata, or one routing domain a server, by commas.
      then_workload: after these requests come as many of this workload (Poisson
        arrivals only).
      placed_for: workload whose frequencies the first placement sees; None: `workload`.
      arrivals: poisson, or a trace: azure_conv, azure_code, mooncake.
      interval_s: mean seconds between requests of a server, or one a server.
      requests_per_server: how many.
      input_tokens: of every request, instead of the domain's (Poisson only).
      output_tokens: likewise.
      trace_speed: factor on the pace of a trace.
      most_tokens: cuts longer requests of a trace.
      skew: exponent on the generator's popularity of experts.
      correlated: whether a request's tokens resemble each other in routing.
      routing_trace: route trace instead of the generator.
      methods: placers and servers that serve alone (`moe_infinity`, `moe_infinity_lb`)
        separated by commas, or `all`: every placer that fits the machines.
      max_batch: requests a server runs at a time.
      period_s: of migration; 0 for none.
      keep: share of statistics that stays after a period.
      hysteresis: share of the cost that a migration must win on top.
      source: of migrating blocks, "host" or "network".
      window_s: of the local ratio over time.
      cache_share: above 0 servers load the blocks that they lack from host memory, into
        this share of their GPUs' memory, instead of asking others.
      timeline_s: spans that begin before this are written; 0 for none.
      seeds: runs, from `seed` on; rows are medians over them.
      data_dir: holds traces.
      seed: of everything random.
    Raises:
      ConfigError: bad input; CapacityError: less memory than one copy of the model.
      RequestError: a trace that cannot be served.
      OutputError: `out_dir` cannot be written.
      OSError: a trace cannot be read.
    """
    given = locals()
    check_count("seeds", seeds)
    names = chosen(methods, "method", METHODS)
    options = LoopOptions(max_batch, window_s, timeline_s)
    check_rule(period_s, keep, hysteresis, source)
    if not 0 <= cache_share < 1:
        raise ConfigError(f"cache_share must lie in [0, 1), got {cache_share}")
    wanted = {name: given[name] for name in CASE_OPTIONS}
    wanted["cluster_options"] = dict(cluster_options or {})
    first = build_case(**wanted, data_dir=data_dir, seed=seed)
    moving = {"period_s": period_s, "keep": keep, "source": source}
    moving |= {"hysteresis": hysteresis, "cache_share": cache_share}
    left_out: dict[str, str] = {}
    if names is None:
        problem = first.problem(seed, cache_share)
        reasons = {name: cls().unfit(problem) for name, cls in PLACERS.items()}
        left_out = {name: reason for name, reason in reasons.items() if reason}
        names = [name for name in PLACERS if name not in left_out]
    if run.dry_run:
        for name in names:
            first.loop(name, options, seed=seed, **moving)
        return {"methods": names}
    runs: dict[str, list[ClusterResult]] = {name: [] for name in names}
    with run.writing() as folder:
        for number in range(seed, seed + seeds):
            case = first
            if number != seed:
                case = build_case(**wanted, data_dir=data_dir, seed=number)
            for name in names:
                loop = case.loop(name, options, seed=number, **moving)
                started = time.perf_counter()
                loop.run()
                result = report(loop)
                runs[name].append(result)
                print(progress(name, number, result, time.perf_counter() - started))
                if number == seed:
                    write_requests(folder / f"requests_{name}.csv", result)
                    if timeline_s:
                        path = folder / f"timeline_{name}.json"
                        write_timeline(path, loop.spans, case.cost_model.cluster)
        rows = {name: median_row(results) for name, results in runs.items()}
        stored = {
            "case": wanted | {"max_batch": max_batch, **moving},
            "hardware": sources(first),
            "seeds": list(range(seed, seed + seeds)),
            "methods": rows,
            "by_seed": {
                name: [result.row() for result in results]
                for name, results in runs.items()
            },
            "local_ratio_over_time": {
                name: {
                    "window_s": window_s,
                    "ratio": [
                        None if np.isnan(x) else round(float(x), 4)
                        for x in r[0].ratio_W
                    ],
                }
                for name, r in runs.items()
            },
            "left_out": left_out,
        }
        write_json(folder / "simulate.json", stored)
    print_table(rows, left_out)
    return {"methods": rows, "left_out": left_out}


def median_row(results: Sequence[ClusterResult]) -> dict[str, Any]:
    """The row of a method: medians over seeds."""
    by_server = zip(*(result.latency_s_N for result in results), strict=True)
    return {
        "latency_s_N": [
            None if None in values else float(np.median(values)) for values in by_server
        ],
        **{
            name: float(np.median([getattr(result, name) for result in results]))
            for name in ("mean_latency_s", "local_ratio", "remote_calls")
        },
    }


def sources(case: Case) -> list[dict[str, Any]]:
    """What is known of every device and link that took part, once each."""
    cluster = case.cost_model.cluster
    links = [cluster.network, *cluster.links.values()]
    found: dict[str, dict[str, Any]] = {}
    for gpu in (gpu for server in cluster.servers for gpu in server.gpus):
        device, link = gpu.device, gpu.host_link
        found[device.name] = {"source": device.source, "checked": device.checked}
        found[f"host link of {device.name}"] = {
            "source": link.source,
            "checked": link.checked,
        }
    for each in links:
        found.setdefault(f"network: {each.source}", {"checked": each.checked})
    return [{"name": name, **facts} for name, facts in found.items()]

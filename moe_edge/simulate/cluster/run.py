"""The root of `moe-edge simulate`: what placements and offloading do to latency."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.core.checks import ConfigError, check_count
from moe_edge.core.files import plain_numbers, write_json
from moe_edge.core.progress import counter
from moe_edge.core.run_folder import RunFolder, root, unpacked
from moe_edge.place.migration_policy import MigrationRule
from moe_edge.place.placer import (
    ALONE,
    Placer,
    PlacerOptions,
    fit_placers,
    listed_placers,
)
from moe_edge.simulate.cluster.build import CaseOptions, build_scenario
from moe_edge.simulate.cluster.loop import LoopOptions
from moe_edge.simulate.cluster.report import (
    ClusterResult,
    print_table,
    progress,
)
from moe_edge.simulate.cluster.run_recorded import check_alone, run_recorded
from moe_edge.simulate.cluster.scenario import Scenario
from moe_edge.simulate.cluster.timeline import write_timeline
from moe_edge.workload.cluster_run import method_file, write_requests


@root
@unpacked(wanted=CaseOptions, options=LoopOptions, rule=MigrationRule)
def run_simulate(
    run: RunFolder,
    *,
    wanted: CaseOptions,
    methods: str | Sequence[str | Placer | type[Placer]] = "all",
    placer_options: PlacerOptions | None = None,
    options: LoopOptions,
    rule: MigrationRule,
    cache_share: float = 0.0,
    seeds: int = 1,
    cluster_run: str | None = None,
    data_dir: str | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Serves the same requests by every method in computed time, and compares.

    Args:
      run: folder of `simulate.json`, `config.gin`, `requests_METHOD.csv` of the
        first seed and, with `timeline_s`, `timeline_METHOD.json` (Perfetto); of a
        `cluster_run` also `events_METHOD.jsonl`.
      wanted, options, rule: what is served, how, and when placements change.
      methods: placers and servers that serve alone (`moe_infinity`, `moe_infinity_lb`)
        separated by commas, or `all`: every placer that fits the machines; from Python
        also a list of names, classes and objects.
      placer_options: {name: {option: value}}.
      cache_share: above 0 servers load the blocks that they lack from host memory, into
        this share of their GPUs' memory, instead of asking others.
      seeds: runs, from `seed` on; rows are medians over them.
      cluster_run: folder of a run of moe-edge cluster, which is done again in computed
        time: its requests, routing, placements and costs. Nothing else is needed.
      data_dir: holds traces.
      seed: of everything random.
    Raises:
      MoeEdgeError: bad input, or less memory than one copy of the model.
      OSError: a trace cannot be read.
    """
    check_count("seeds", seeds)
    placers = listed_placers(methods, placer_options, ALONE)
    if cluster_run is not None:
        others = {"cache_share": cache_share, "seeds": seeds - 1, "seed": seed}
        check_alone([wanted, rule, options], others)
        run.check_apart(cluster_run)
        return run_recorded(run, cluster_run, placers and [*placers], options)
    if not 0 <= cache_share < 1:
        raise ConfigError(f"cache_share must lie in [0, 1), got {cache_share}")
    first = build_scenario(**vars(wanted), data_dir=data_dir, seed=seed)
    moving = vars(rule) | {"cache_share": cache_share}
    left_out: dict[str, str] = {}
    if placers is None:
        placers, left_out = fit_placers(
            first.problem(seed, cache_share), placer_options
        )
    if run.dry_run:
        for name, placer in placers.items():
            first.loop(placer or name, options, seed=seed, **moving)
        return {"methods": [*placers]}
    runs: dict[str, list[ClusterResult]] = {name: [] for name in placers}
    spans = {}  # of the first seed
    with counter("runs", seeds * len(placers)) as count:
        for number in range(seed, seed + seeds):
            case = first
            if number != seed:
                case = build_scenario(**vars(wanted), data_dir=data_dir, seed=number)
            for name, placer in placers.items():
                loop = case.loop(placer or name, options, seed=number, **moving)
                started = time.perf_counter()
                loop.run()
                result = ClusterResult(loop)
                runs[name].append(result)
                print(progress(name, number, result, time.perf_counter() - started))
                count(1)
                if number == seed and options.timeline_s:
                    spans[name] = loop.spans
    rows = {name: median_row(results) for name, results in runs.items()}
    case = vars(wanted) | {"cluster_options": dict(wanted.cluster_options or {})}
    stored = {
        "case": case | {"max_batch": options.max_batch, **moving},
        "hardware": sources(first),
        "seeds": list(range(seed, seed + seeds)),
        "methods": rows,
        "by_seed": {name: [r.row() for r in found] for name, found in runs.items()},
        "local_ratio_over_time": {
            name: {
                "window_s": options.window_s,
                "ratio": plain_numbers(found[0].ratio_W, 4),
            }
            for name, found in runs.items()
        },
        "left_out": left_out,
    }

    def save(folder: Path) -> None:
        for name, found in runs.items():
            write_requests(folder / method_file("requests", name), found[0].served)
            if name in spans:
                path = folder / f"timeline_{name}.json"
                write_timeline(path, spans[name], first.cost_model.cluster)
        write_json(folder / "simulate.json", stored)

    run.write(save)
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


def sources(case: Scenario) -> list[dict[str, Any]]:
    """What is known of every device and link that took part, once each."""
    cluster = case.cost_model.cluster
    links = [cluster.network, *cluster.links.values()]
    found: dict[str, dict[str, Any]] = {}
    for gpu in (gpu for server in cluster.servers for gpu in server.gpus):
        name = gpu.device.name
        for part, each in ((name, gpu.device), (f"host link of {name}", gpu.host_link)):
            found[part] = {"source": each.source, "checked": each.checked}
    for each in links:
        found.setdefault(f"network: {each.source}", {"checked": each.checked})
    return [{"name": name, **facts} for name, facts in found.items()]

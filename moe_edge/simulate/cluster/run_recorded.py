"""`moe-edge simulate --cluster_run DIR`: a real run beside the simulator."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_edge.core.checks import ConfigError, check_known
from moe_edge.core.events import write_events
from moe_edge.core.files import write_json
from moe_edge.core.run_folder import RunFolder
from moe_edge.core.typed import changed
from moe_edge.place.placer import ALONE
from moe_edge.simulate.cluster.loop import LoopOptions
from moe_edge.simulate.cluster.recorded import Recorded
from moe_edge.simulate.cluster.report import print_table, progress
from moe_edge.simulate.cluster.timeline import write_timeline
from moe_edge.workload.cluster_run import method_file, write_requests
from moe_edge.workload.cluster_run_reader import ClusterRun

ALLOWED = ("timeline_s", "window_s")  # what a run does not say itself


def check_alone(options: Sequence[Any], others: Mapping[str, Any]) -> None:
    """Raises ConfigError for options that a recorded run says itself.

    Args:
      options: dataclasses; at their defaults they say nothing.
      others: name -> value; what is false says nothing.
    """
    idle = [name for name, value in others.items() if value]
    idle += [name for one in options for name in changed(one)]
    if idle := [name for name in idle if name not in ALLOWED]:
        raise ConfigError(
            f"{', '.join(idle)} would have no effect with a cluster_run, which says "
            "that itself; drop one of them"
        )


def run_recorded(
    run: RunFolder, cluster_run: str, names: list[str] | None, options: LoopOptions
) -> dict[str, Any]:
    """Replays methods of a run with its own calibration; files and rows as it has.

    Args:
      names: methods; None: all of the run that place blocks.
    Raises:
      ConfigError: no such run or method; OSError: a file of it cannot be read.
    """
    cluster = ClusterRun(cluster_run)
    placed = [name for name in cluster.facts.methods if name not in ALONE]
    if not (names := placed if names is None else names):
        raise ConfigError(
            f"cluster_run {cluster_run}: its servers made no calls; expected a method "
            "that places blocks, whose calls can be simulated"
        )
    for name in names:
        check_known("method of the run", name, placed)
    found = {name: Recorded(cluster, name, options) for name in names}
    if run.dry_run:
        return {"methods": names}
    rows, served = {}, {}
    for name, recorded in found.items():
        started = time.perf_counter()
        result = recorded.simulate()
        rows[name], served[name] = recorded.row(result), result.served
        print(progress(name, 0, result, time.perf_counter() - started))

    def save(folder: Path) -> None:
        for name, recorded in found.items():
            write_requests(folder / method_file("requests", name), served[name])
            write_events(folder / method_file("events", name), recorded.events())
            if options.timeline_s:
                path = folder / f"timeline_{name}.json"
                loop = recorded.loop
                write_timeline(path, loop.spans, loop.cost_model.cluster)
        stored = {"cluster_run": str(cluster_run), "methods": rows}
        write_json(folder / "simulate.json", stored)

    run.write(save)
    print_table(rows, {})
    for name, row in rows.items():
        print(
            f"{name}: measured {row['measured_latency_s']:.3f} s, simulated "
            f"{row['mean_latency_s']:.3f} s ({row['error_pct']:+.1f} %)"
        )
    return {"methods": rows}

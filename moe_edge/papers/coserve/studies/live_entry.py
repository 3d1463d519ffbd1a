"""What the entries of live runs of CoServe have in common."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from moe_edge.metrics.frames import Rows
from moe_edge.papers.coserve.studies.live import LiveSettings
from moe_edge.papers.coserve.studies.live_runs import LiveTask

EQUAL = "every policy gave each request the same verdict by the same experts"
COMPLETE = "no request failed"


@contextlib.contextmanager
def board_folder(settings: LiveSettings) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(settings.work_dir or temporary)


def tell(rows: Rows, settings: LiveSettings, found: Mapping[str, LiveTask]) -> None:
    """What is said of live runs, and the checks that all have to pass."""
    first = next(iter(found.values()))
    graph = first.case.graph
    costs = {
        f"{name} on {kind}": {"k_ms": 1e3 * one.k_s, "b_ms": 1e3 * one.b_s}
        for kind, each in first.case.machine.devices.items()
        for name, one in each.items()
    }
    rows.about |= {
        "model": {
            "name": ", ".join(graph.architectures),
            "params": {n: a.record_bytes // 2 for n, a in graph.architectures.items()},
            "weights": "random" if settings.graph is None else settings.graph,
        },
        "workload": dataclasses.asdict(settings) | {"work_dir": None, "costs": costs},
        "kind": first.kind,
        "seeds": [settings.seed],
    }
    rows.checks[EQUAL] = all(one.equal for one in found.values())
    rows.checks[COMPLETE] = all(one.complete for one in found.values())

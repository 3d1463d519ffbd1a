"""What the entries of live runs of CoServe have in common."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from moe_edge.bench.study import Findings
from moe_edge.papers.coserve.studies.live import LiveSettings
from moe_edge.papers.coserve.studies.live_runs import LiveTask

EQUAL = "every policy gave each request the same verdict by the same experts"
COMPLETE = "no request failed"


@contextlib.contextmanager
def board_folder(settings: LiveSettings) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(settings.work_dir or temporary)


def live_findings(
    settings: LiveSettings, found: Mapping[str, LiveTask], **more
) -> Findings:
    """Findings with the checks that all live runs have to pass."""
    first = next(iter(found.values()))
    graph = first.case.graph
    costs = {
        f"{name} on {kind}": {"k_ms": 1e3 * one.k_s, "b_ms": 1e3 * one.b_s}
        for kind, each in first.case.machine.devices.items()
        for name, one in each.items()
    }
    limits = [
        "One machine; other programs may have shared it. Loads from disk and host "
        "memory last what preset `reduced` says (100 and 35 ms), computing what it "
        "does here.",
        "Weights are random unless a graph was given; verdicts mean nothing then.",
        *more.pop("limits", ()),
    ]
    details = [text for text in more.pop("details", ()) if text]
    return Findings(
        model={
            "name": ", ".join(graph.architectures),
            "params": {n: a.record_bytes // 2 for n, a in graph.architectures.items()},
            "weights": "random" if settings.graph is None else settings.graph,
        },
        workload=dataclasses.asdict(settings) | {"work_dir": None, "costs": costs},
        kind=first.kind,
        seeds=[settings.seed],
        details=details,
        limits=limits,
        checks={
            EQUAL: all(one.equal for one in found.values()),
            COMPLETE: all(one.complete for one in found.values()),
        },
        **more,
    )

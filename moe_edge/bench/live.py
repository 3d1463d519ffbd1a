"""Runs of the live cluster for studies: a cache of programs, and what files say."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_edge.cluster.run import run_cluster
from moe_edge.core.json_reader import LARGE_FILE_BYTES, json_objects, read_json
from moe_edge.workload.cluster_run import CLUSTER_FILE

CACHE = "JAX_COMPILATION_CACHE_DIR"
KEEP_ALL = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def live_run(folder: Path, **options) -> dict[str, Any]:
    """Runs a cluster into a folder; returns its cluster.json.

    Args:
      options: of `PrismOptions`.
    Raises:
      MoeEdgeError: bad options, missing rights, or a cluster that is lost.
    """
    run_cluster(out_dir=str(folder), overwrite=True, **options)
    return read_json(folder / CLUSTER_FILE, strict=False, max_bytes=LARGE_FILE_BYTES)


@contextlib.contextmanager
def kept_compiled(folder: Path) -> Iterator[None]:
    """Processes that start meanwhile share what they compile.

    Args:
      folder: of the cache, unless the environment names one already.
    """
    added = KEEP_ALL | {CACHE: os.environ.get(CACHE, str(folder))}
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    return [row for _, row in json_objects(path, strict=False)]


def token_times_s(
    events: Iterable[Mapping[str, Any]], spans: Sequence[tuple[float, float]]
) -> tuple[list[float], list[float]]:
    """Times of decoded tokens that overlap one of the spans, and of the others."""
    during, without = [], []
    for event in events:
        if event["kind"] == "compute" and event["step"]:  # step 0 is the prompt's
            begun_s, end_s = event["t_s"], event["t_s"] + event["dur_s"]
            moving = any(begun_s < last and end_s > first for first, last in spans)
            (during if moving else without).append(event["dur_s"])
    return during, without

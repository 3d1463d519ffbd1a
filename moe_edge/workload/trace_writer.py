"""Writes route traces in our format; `trace_reader.py` says what that is."""

import gzip
import io
import os
from pathlib import Path

import numpy as np

from moe_edge.core.checks import ConfigError, OutputError
from moe_edge.workload.trace_reader import (
    COSTS,
    KEYS,
    OF_CLUSTER,
    SCORES_FILE,
    ids_crc32,
)
from moe_edge.workload.traces import Trace


def write_trace(path: str | Path, trace: Trace, with_scores: bool = False) -> None:
    """Writes a CSV file (gzip if the name ends so), with `scores.npz` on demand.

    Both are renamed into place when complete.

    Raises:
      ConfigError: scores asked for and not recorded.
      OutputError: the folder cannot be written.
    """
    path = Path(path)
    if with_scores and trace.scores_TE is None:
        raise ConfigError(
            f"trace {path}: scores were not recorded, so none can be kept"
        )
    data = _csv(trace).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, compresslevel=6, mtime=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if with_scores:
            scores = io.BytesIO()
            np.savez_compressed(
                scores, scores=trace.scores_TE, ids_crc32=ids_crc32(trace.ids_TK)
            )
            _write(path.with_name(SCORES_FILE), scores.getvalue())
        _write(path, data)
    except OSError as error:
        raise OutputError(f"trace {path} cannot be written: {error}") from error


def _csv(trace: Trace) -> str:
    used_TK = trace.ids_TK >= 0
    rows, rank = np.nonzero(used_TK)
    columns = {name: getattr(trace, name)[rows] for name in KEYS} | {"rank": rank}
    ranked = {"expert": trace.ids_TK, "weight": trace.weights_TK}
    ranked |= {name: getattr(trace, f"{name}_TK") for name in COSTS}
    columns |= {
        n: all_TK[used_TK] for n, all_TK in ranked.items() if all_TK is not None
    }
    of_cluster = (trace.server, trace.holder_TK, trace.version)
    for name, array in zip(OF_CLUSTER, of_cluster, strict=True):
        if array is not None:
            columns[name] = array[used_TK] if array.ndim == 2 else array[rows]
    # %.9g gives back the same float32.
    line = ",".join("%.9g" if n in ("weight", "wait_s") else "%d" for n in columns)
    lists = [column.tolist() for column in columns.values()]
    body = "\n".join([line % row for row in zip(*lists, strict=True)])
    head = f"# num_experts={trace.num_experts} top_k={trace.top_k}\n"
    return f"{head}{','.join(columns)}\n{body}\n"


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)

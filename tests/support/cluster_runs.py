"""Folders of small cluster runs, made without a cluster."""

from pathlib import Path

import numpy as np

from moe_edge.hardware.cluster_calibration import (
    BucketCosts,
    ClusterCalibration,
    Messages,
    ServerCosts,
)
from moe_edge.place.plan import Placement
from moe_edge.workload.cluster_run import (
    ClusterFacts,
    RequestRow,
    TableChange,
    method_file,
    write_migrations,
    write_requests,
)
from moe_edge.workload.trace_writer import write_trace
from moe_edge.workload.traces import DECODE, PREFILL, Trace, ordered_trace


def calibration(servers=2, messages=None, **bucket) -> ClusterCalibration:
    """Equal servers, times in binary fractions; `bucket`: of both sizes, 1 and 16."""
    costs = {"dense_s": 0.5, "pair_s": 0.25} | bucket
    each = [BucketCosts(tokens=tokens, **costs) for tokens in (1, 16)]
    network = {"base_s": 0.125, "each_s": 0.0, "bytes_per_s": 128.0, "call_bytes": 0}
    network |= {"token_bytes": 16, "pair_bytes": 0, "row_bytes": 16}
    return ClusterCalibration(
        servers=[ServerCosts(buckets=each, load_s=1.0)] * servers,
        messages=Messages(**(network | (messages or {}))),
        source="made by a test",
    )


def facts(**changes) -> ClusterFacts:
    """Two servers, two layers of four blocks, two a token."""
    sizes = {"num_layers": 2, "num_experts": 4, "top_k": 2, "block_bytes": 768}
    given = {"methods": ["optimal"], "slots": [4, 4], "chunk_tokens": 16} | sizes
    return ClusterFacts(**(given | changes))


def cluster_trace(ids, servers, prompts, holder_XLE, num_experts=4) -> Trace:
    """The trace of requests that were served one after another.

    Args:
      ids: for every request int [T, L, K].
      servers, prompts: of every request, where it was served and tokens of its prompt.
      holder_XLE: int [N, L, E], whom a server asks.
    """
    columns = {name: [] for name in ("request", "phase", "step", "layer", "server")}
    rows, step = [], 0
    for request, ids_TLK in enumerate(ids):
        for token, ids_LK in enumerate(ids_TLK):
            for layer, ids_K in enumerate(ids_LK):
                columns["request"].append(request)
                phase = PREFILL if token < prompts[request] else DECODE
                columns["phase"].append(phase)
                columns["step"].append(step)
                columns["layer"].append(layer)
                columns["server"].append(servers[request])
                rows.append(ids_K)
            step += 1
    arrays = {name: np.array(column, np.int32) for name, column in columns.items()}
    ids_TK = np.array(rows, np.int32)
    asked = (arrays["server"][:, None], arrays["layer"][:, None], ids_TK)
    return ordered_trace(
        num_experts,
        ids_TK.shape[1],
        **arrays,
        ids_TK=ids_TK,
        weights_TK=np.full(ids_TK.shape, 0.5, np.float32),
        hit_TK=np.ones(ids_TK.shape, bool),
        bytes_TK=np.zeros(ids_TK.shape, np.int64),
        wait_s_TK=np.zeros(ids_TK.shape, np.float32),
        version=np.zeros(len(ids_TK), np.int32),
        holder_TK=np.asarray(holder_XLE, np.int32)[asked],
    )


def write_run(
    folder: Path,
    of: ClusterFacts,
    costs: ClusterCalibration,
    placement: Placement,
    served: list[RequestRow],
    trace: Trace,
    changes: list[TableChange] | None = None,
    method: str = "optimal",
) -> None:
    """All files of a run of one method."""
    folder.mkdir(exist_ok=True)
    of.save(folder)
    costs.save(folder)
    placement.save(folder / method_file("placement", method))
    write_requests(folder / method_file("requests", method), served)
    write_trace(folder / method_file("trace", method), trace)
    write_migrations(folder / method_file("migrations", method), changes or [])

"""The files of a cluster's run, written: a real run and the simulator share them.

    cluster.json               what was run (`ClusterFacts`)
    calibration.json           what it costs (`hardware/cluster_calibration.py`)
    calibration_METHOD.json    what it cost while this method ran
    requests_METHOD.csv        a line a request, in order of arrival, from request 0 on
    placement_METHOD.npy/json  at the start (`place/plan.py`)
    migrations_METHOD.jsonl    a line a version of the table (`TableChange`)
    trace_METHOD.csv.gz        who computed which block of which token (`traces.Trace`)
    events_METHOD.jsonl        what happened (`core/events.py`)

Times are seconds from the start of a method's run, except for latencies, which count
from a request's arrival. `cluster_run_reader.py` reads a folder.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moe_edge.core.checks import (
    ConfigError,
    check_count,
    check_from_zero,
)
from moe_edge.core.files import write_json, write_text
from moe_edge.workload.traces import PREFILL, Trace, ordered_trace

FORMAT_VERSION = 1
CLUSTER_FILE = "cluster.json"
FROM_CHECKPOINT = -1  # a block that nobody sent: its server read it
REQUESTS_HEAD = "server,domain,arrival_s,first_token_s,latency_s"


def method_file(kind: str, method: str) -> str:
    """Name of a file of one method, or the stem of a placement's two.

    Args:
      kind: calibration, requests, placement, migrations, trace or events.
    """
    ending = {"requests": ".csv", "placement": "", "trace": ".csv.gz"}
    ending["calibration"] = ".json"
    return f"{kind}_{method}{ending.get(kind, '.jsonl')}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterFacts:
    """What a reader must know of a run; cluster.json may say more.

    Attributes:
      methods: that were run, in order.
      slots: blocks that a placement may use on each server.
      num_layers: layers with routed experts.
      num_experts, top_k: blocks a layer and a token.
      block_bytes: of one block.
      max_batch: requests that a server runs at a time.
      chunk_tokens: most tokens of a prompt that pass the layers together.
    """

    methods: Sequence[str]
    slots: Sequence[int]
    num_layers: int
    num_experts: int
    top_k: int
    block_bytes: int
    max_batch: int = 1
    chunk_tokens: int = 512

    def __post_init__(self):
        for name in ("num_layers", "num_experts", "top_k", "block_bytes"):
            check_count(name, getattr(self, name))
        for name in ("max_batch", "chunk_tokens"):
            check_count(name, getattr(self, name))
        for name in ("methods", "slots"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty, expected at least one")
        for slots in self.slots:
            check_from_zero("slots of a server", slots)
        for method in self.methods:
            if not method.isidentifier():
                raise ConfigError(f"method {method!r} cannot be part of a file's name")

    @property
    def num_servers(self) -> int:
        return len(self.slots)

    def save(self, folder: str | Path, more: Mapping[str, Any] | None = None) -> None:
        """Writes `cluster.json`, with whatever else the run wants to say."""
        stored = {"format_version": FORMAT_VERSION} | dict(more or {})
        write_json(Path(folder) / CLUSTER_FILE, stored | dataclasses.asdict(self))


class RequestRow(NamedTuple):
    """A request that was served: a line of `requests_METHOD.csv`.

    Attributes:
      server: at which it arrived.
      domain: of its text.
      arrival_s: from the start of the method's run.
      first_token_s, latency_s: from its arrival to its first and last token; NaN
        (written as nothing) for a request that was lost.
    """

    server: int
    domain: str
    arrival_s: float
    first_token_s: float
    latency_s: float


def write_requests(path: str | Path, served: Iterable[RequestRow]) -> None:
    """Writes a line a request, in order of arrival."""
    lines = [REQUESTS_HEAD]
    for server, domain, *seconds in served:
        cells = ("" if np.isnan(s) else f"{s:.6f}" for s in seconds)
        lines.append(",".join([str(server), domain, *cells]))
    write_text(path, "\n".join(lines) + "\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableChange:
    """A new version of the table of targets: a line of `migrations_METHOD.jsonl`.

    Attributes:
      t_s: when it was in force everywhere.
      version: rises by one a line; the placement at the start is version 0.
      moves: (server, layer, block) of copies that arrived.
      drops: likewise, of copies that were no longer asked and went.
      sources: of every move the server that sent it, or FROM_CHECKPOINT; empty if not
        recorded.
      begun_s: when the first of these blocks was sent; None if not recorded.
    """

    t_s: float
    version: int
    moves: Sequence[Sequence[int]]
    drops: Sequence[Sequence[int]] = ()
    sources: Sequence[int] = ()
    begun_s: float | None = None

    def __post_init__(self):
        check_from_zero("t_s", self.t_s)
        if self.sources and len(self.sources) != len(self.moves):
            raise ConfigError(
                f"{len(self.sources)} sources for {len(self.moves)} moves; give each"
            )


def write_migrations(path: str | Path, changes: Iterable[TableChange]) -> None:
    """Writes a line a change; an empty file where nothing moved."""
    lines = []
    for change in changes:
        lines.append(json.dumps(dataclasses.asdict(change), allow_nan=False) + "\n")
    write_text(path, "".join(lines))


def join_traces(traces: Sequence[Trace]) -> Trace:
    """One trace of those that the servers of a cluster kept, each with its own steps.

    Step s of the i-th of n becomes step s * n + i, so that no two of them share one.

    Raises:
      ConfigError: none, or of different models, or some with columns that others lack.
    """
    if not traces:
        raise ConfigError("no trace to join; expected one a server")
    kinds, parts = [], []
    for number, trace in enumerate(traces):
        fields = dataclasses.fields(trace)[2:]
        rows = {field.name: getattr(trace, field.name) for field in fields}
        rows["step"] = trace.step * len(traces) + number
        has = sorted(name for name, array in rows.items() if array is not None)
        kinds.append((trace.num_experts, trace.top_k, has))
        parts.append(rows)
        if kinds[number] != kinds[0]:
            raise ConfigError(
                f"trace {number} has (experts, top k, columns) {kinds[number]}, trace "
                f"0 has {kinds[0]}; record alike everywhere"
            )
    joined = {name: np.concatenate([rows[name] for rows in parts]) for name in has}
    return ordered_trace(traces[0].num_experts, traces[0].top_k, **joined)


class Locality(NamedTuple):
    """What a trace says of where blocks were computed.

    Attributes:
      local_pairs, pairs: (token, block) pairs on the server that asked, and in all.
      remote_calls: blocks asked of other servers, each once a step and layer.
    """

    local_pairs: int
    pairs: int
    remote_calls: int

    @property
    def local_ratio(self) -> float:
        return self.local_pairs / self.pairs


def locality(trace: Trace, chunk_tokens: int) -> Locality:
    """Counts of a cluster's trace, as the simulator reports them.

    Args:
      chunk_tokens: tokens of a prompt that pass the layers in one step.
    """
    chosen_TK = trace.ids_TK >= 0
    away_TK = chosen_TK & (trace.holder_TK != trace.server[:, None])
    step_T = np.where(trace.phase == PREFILL, _chunks(trace, chunk_tokens), trace.step)
    token, rank = np.nonzero(away_TK)
    keys = [key[token] for key in (trace.phase, trace.server, step_T, trace.layer)]
    asked_X5 = np.stack([*keys, trace.ids_TK[token, rank]], axis=1)
    calls = len(np.unique(asked_X5, axis=0))
    pairs = int(chosen_TK.sum())
    return Locality(pairs - int(away_TK.sum()), pairs, calls)


def _chunks(trace: Trace, chunk_tokens: int) -> np.ndarray:
    """int [T]: of rows of prompts, a number for each request and chunk at a server."""
    keys = (trace.server, trace.request, trace.step)
    keys_T3 = np.stack(keys, axis=1, dtype=np.int64)
    keys_T3 = np.where(trace.phase[:, None] == PREFILL, keys_T3, -1)
    tokens_U3, token_T = np.unique(keys_T3, axis=0, return_inverse=True)
    both_U = tokens_U3[:, 0] * 2**31 + tokens_U3[:, 1]
    place_U = np.arange(len(both_U)) - np.searchsorted(both_U, both_U)
    chunk_U = tokens_U3[:, 1] * 2**31 + place_U // chunk_tokens
    return chunk_U[token_T.reshape(-1)]

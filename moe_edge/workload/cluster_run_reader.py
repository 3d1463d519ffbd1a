"""Reads the folder of a cluster's run, strictly; `cluster_run.py` names its files."""

import csv
import dataclasses
import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moe_edge.core.checks import ConfigError, check_known
from moe_edge.core.files import decode_utf8
from moe_edge.core.json_reader import LARGE_FILE_BYTES, json_lines, read_json
from moe_edge.core.typed import built
from moe_edge.hardware.cluster_calibration import (
    CALIBRATION_FILE,
    ClusterCalibration,
)
from moe_edge.workload.cluster_run import (
    CLUSTER_FILE,
    FORMAT_VERSION,
    FROM_CHECKPOINT,
    REQUESTS_HEAD,
    ClusterFacts,
    RequestRow,
    TableChange,
    method_file,
)
from moe_edge.workload.requests import Request
from moe_edge.workload.trace_reader import read_trace
from moe_edge.workload.traces import PREFILL, Trace


@dataclasses.dataclass(frozen=True)
class MethodRun:
    """One method's run.

    Attributes:
      requests: as they were served: lengths are those of the trace.
      served: what was measured of each.
      ids_TLK: int32, chosen experts of every token, request after request: its prompt,
        then the tokens that were fed back.
      first_R: int64 [R], the row of `ids_TLK` at which each request begins.
      changes: of the table, in order.
      placement: stem of its placement at the start.
      trace: all of it.
      calibration: its costs; those of the whole run where it has none of its own.
    """

    requests: list[Request]
    served: list[RequestRow]
    ids_TLK: np.ndarray
    first_R: np.ndarray
    changes: list[TableChange]
    placement: Path
    trace: Trace
    calibration: ClusterCalibration


class ClusterRun:
    """The folder of a run.

    Attributes:
      folder: where it is.
      facts: what was run.
      calibration: what it costs.
    Raises:
      ConfigError: no such folder, or files that do not belong together.
      OSError: a file cannot be read.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not (self.folder / CLUSTER_FILE).is_file():
            raise ConfigError(
                f"{folder} holds no {CLUSTER_FILE}, so it is no run of a cluster; name "
                "the --out_dir of moe-edge cluster"
            )
        self.facts = read_facts(self.folder)
        self.calibration = self._calibration(CALIBRATION_FILE)

    def method(self, name: str) -> MethodRun:
        """One method's files.

        Raises:
          ConfigError: an unknown method, or files that do not belong together.
          OSError: a file cannot be read.
        """
        check_known("method of the run", name, self.facts.methods)
        served = read_requests(self._path("requests", name))
        path = self._path("trace", name)
        trace = read_trace(path, self.facts.num_experts)
        try:
            ids_TLK, first_R, lengths = self._tokens(trace, served)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        requests = [
            Request(number, s.server, s.arrival_s, *lengths[number], s.domain)
            for number, s in enumerate(served)
        ]
        changes = read_migrations(self._path("migrations", name), self.facts)
        stem = self._path("placement", name)
        calibration, own = self.calibration, self._path("calibration", name)
        if own.is_file():
            calibration = self._calibration(own.name)
        files = (requests, served, ids_TLK, first_R, changes, stem, trace, calibration)
        return MethodRun(*files)

    def _calibration(self, name: str) -> ClusterCalibration:
        found = ClusterCalibration.load(self.folder, name)
        known, stated = len(found.servers), self.facts.num_servers
        if known != stated:
            raise ConfigError(
                f"{self.folder}: {name} is of {known} servers, {CLUSTER_FILE} has "
                f"slots of {stated}"
            )
        return found

    def _path(self, kind: str, method: str) -> Path:
        return self.folder / method_file(kind, method)

    def _tokens(self, trace: Trace, served: list[RequestRow]):
        """Routing token by token, and lengths [prompt, answer] of every request."""
        facts, count = self.facts, len(served)
        if trace.server is None or trace.holder_TK is None:
            raise ConfigError("it has no columns server and holder, as a cluster's has")
        layers, layer_T = np.unique(trace.layer, return_inverse=True)
        got = (len(layers), trace.top_k)
        if got != (facts.num_layers, facts.top_k):
            raise ConfigError(
                f"it has (layers, top k) {got}, {CLUSTER_FILE} says "
                f"{(facts.num_layers, facts.top_k)}"
            )
        for name, most in (("request", count), ("server", facts.num_servers)):
            worst = int(getattr(trace, name).max())
            if worst >= most:
                raise ConfigError(f"{name} {worst}, expected 0 to {most - 1}")
        if (trace.ids_TK < 0).any() or trace.holder_TK.max() >= facts.num_servers:
            raise ConfigError(
                f"every token needs {facts.top_k} experts of holders 0 to "
                f"{facts.num_servers - 1}"
            )
        pairs = np.unique(np.stack([trace.request, trace.server]), axis=1)
        for number, server in pairs.T.tolist():
            if server != served[number].server:
                raise ConfigError(
                    f"request {number} came to server {served[number].server} and was "
                    f"served by {server}: only runs without failures can be replayed"
                )
        order = np.lexsort((layer_T, trace.step, trace.phase, trace.request))
        L, T = len(layers), len(order) // len(layers)
        whole = len(order) == T * L and (layer_T[order].reshape(T, L) == np.arange(L))
        if not np.all(whole):
            raise ConfigError(
                f"a token did not pass each of the {L} layers once; a prompt's token "
                "has a step of its own"
            )
        request_T = trace.request[order[::L]]
        prompt_T = trace.phase[order[::L]] == PREFILL
        rows_R = np.bincount(request_T, minlength=count)
        input_R = np.bincount(request_T[prompt_T], minlength=count)
        for number in np.flatnonzero(input_R == 0):
            raise ConfigError(f"request {number} has no row of its prompt")
        lengths = np.stack([input_R, rows_R - input_R + 1], axis=1).tolist()
        ids_TLK = trace.ids_TK[order].reshape(T, L, trace.top_k)
        return ids_TLK, np.cumsum(rows_R) - rows_R, lengths


def read_facts(folder: Path) -> ClusterFacts:
    """Reads cluster.json.

    Raises:
      ConfigError: another content or version.
    """
    path = folder / CLUSTER_FILE
    stored = read_json(path, strict=False, max_bytes=LARGE_FILE_BYTES)
    try:
        version = stored.get("format_version") if isinstance(stored, dict) else None
        if version != FORMAT_VERSION:
            raise ConfigError(
                f"format_version is {version}, expected {FORMAT_VERSION}; run the "
                "cluster again"
            )
        return built("cluster", ClusterFacts, stored, ignore_more=True)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_requests(path: Path) -> list[RequestRow]:
    """Reads requests_METHOD.csv.

    Raises:
      ConfigError: another content, or a request that was lost.
    """
    served: list[RequestRow] = []
    rows = csv.reader(io.StringIO(decode_utf8(path, path.read_bytes())))
    head = ",".join(next(rows, []))
    if head != REQUESTS_HEAD:
        raise ConfigError(f"{path} begins {head!r:.60}, expected {REQUESTS_HEAD}")
    for number, row in enumerate(rows):
        where = f"{path}: request {number}"
        if row[4:5] == [""]:
            raise ConfigError(
                f"{where} has no latency: it was lost; only runs that served all can "
                "be replayed"
            )
        try:
            server, domain, *seconds = row
            one = RequestRow(int(server), domain, *map(float, seconds))
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{where} is {','.join(row)!r:.60}, expected {REQUESTS_HEAD}"
            ) from error
        if not all(math.isfinite(s) and s >= 0 for s in one[2:]):
            raise ConfigError(f"{where} has times {list(one[2:])}, expected from 0")
        if served and one.arrival_s < served[-1].arrival_s:
            raise ConfigError(f"{where} arrives before the one above it")
        served.append(one)
    if not served:
        raise ConfigError(f"{path} has no request")
    return served


def read_migrations(path: Path, facts: ClusterFacts) -> list[TableChange]:
    """Reads migrations_METHOD.jsonl; without the file nothing moved.

    Raises:
      ConfigError: another content, versions or times that do not rise, or blocks that
        are none of the model.
    """
    changes: list[TableChange] = []
    if not path.is_file():
        return changes
    sizes = (facts.num_servers, facts.num_layers, facts.num_experts)
    for number, (where, row) in enumerate(json_lines(path)):
        change = built(where, TableChange, row)
        before = changes[-1] if changes else None
        if change.version != number + 1 or (before and change.t_s < before.t_s):
            raise ConfigError(
                f"{where} is version {change.version} at {change.t_s} s, expected "
                f"version {number + 1}, not before the line above"
            )
        for copy in (*change.moves, *change.drops):
            if not _inside(copy, sizes):
                raise ConfigError(
                    f"{where}: {copy!r:.40} is no (server, layer, block) below "
                    f"{list(sizes)}"
                )
        for source in change.sources:
            if not FROM_CHECKPOINT <= source < facts.num_servers:
                raise ConfigError(
                    f"{where}: source {source}, expected {FROM_CHECKPOINT} to "
                    f"{facts.num_servers - 1}"
                )
        changes.append(change)
    return changes


def _inside(copy: Sequence[int], sizes: tuple[int, ...]) -> bool:
    whole = len(copy) == len(sizes)
    return whole and all(0 <= x < most for x, most in zip(copy, sizes, strict=True))

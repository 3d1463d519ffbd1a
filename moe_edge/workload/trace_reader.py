"""Reads route traces: CSV, gzip or plain, one line a chosen expert.

Ours start with `# num_experts=E top_k=k` and have the columns
`request,phase,step,layer,rank,expert,weight,hit,bytes,wait_s`, those of a cluster's
run also `server,holder,version`; public files have no header line, `turn` for `request`
and none of the last three. `scores.npz` next to a file may hold the scores of all
experts.
"""

import gzip
import io
import re
import zipfile
import zlib
from pathlib import Path

import numpy as np

from moe_edge.core.checks import ConfigError, check_count
from moe_edge.core.npy import HEADER_ERRORS
from moe_edge.workload.traces import Trace, ordered_trace

KEYS = ("request", "phase", "step", "layer")
NEEDED = (*KEYS, "rank", "expert", "weight")
COSTS = {"hit": bool, "bytes": np.int64, "wait_s": np.float32}
OF_CLUSTER = ("server", "holder", "version")  # int32
SCORES_FILE = "scores.npz"
GZIP_MAGIC = b"\x1f\x8b"
MAX_EXPERTS = 2**20  # of a layer; tables are made of this size


def read_trace(path: str | Path, num_experts: int | None = None) -> Trace:
    """Reads a route trace of either format, with the scores that belong to it.

    Args:
      path: CSV file; the ending `.gz` promises gzip.
      num_experts: experts of a layer, for files without a header line.
    Raises:
      ConfigError: another content, or an unknown number of experts.
      OSError: the file cannot be read.
    """
    try:
        return _read(Path(path), num_experts)
    except ConfigError as error:
        raise ConfigError(f"trace {path}: {error}") from error


def _read(path: Path, num_experts: int | None) -> Trace:
    header, names, body = _split(_text(path))
    num_experts = _num_experts(header.get("num_experts"), num_experts)
    table = _numbers(names, body)
    columns = {name: table[:, i] for i, name in enumerate(names)}
    if "request" not in columns:
        columns["request"] = columns["turn"]
        columns["step"] = _run_steps(columns)
    for name in NEEDED[:-1]:
        above = {"expert": num_experts, "phase": 2}.get(name, 2**31)
        _check_whole(name, columns[name], above)
    for name in OF_CLUSTER:
        if name in columns:
            _check_whole(name, columns[name], 2**31)
    for name, above in (("hit", 2), ("bytes", 2**53)):  # floats are exact below
        if name in columns:
            _check_whole(name, columns[name], above)
    for row in np.flatnonzero(columns.get("wait_s", np.zeros(0)) < 0):
        raise ConfigError(
            f"row {row}: wait_s is {columns['wait_s'][row]:g}, expected 0 or more"
        )
    return _trace(path, columns, num_experts, header.get("top_k"))


def _text(path: Path) -> str:
    data = path.read_bytes()
    try:
        if data.startswith(GZIP_MAGIC):
            data = gzip.decompress(data)
        elif path.suffix == ".gz" and data:
            raise ConfigError("it is no gzip file; plain CSV ends in .csv")
        text = data.decode("utf-8")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f"it is a damaged gzip file: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"it is no text: {error}") from error
    if not text.strip():
        raise ConfigError("it is empty")
    return text


def _split(text: str) -> tuple[dict[str, int], list[str], str]:
    """Values of the header line, column names, and the lines of numbers."""
    header = {}
    if text.startswith("#"):
        line, _, text = text.partition("\n")
        header = {k: int(v) for k, v in re.findall(r"(\w+)=(\d{1,20})(?!\S)", line)}
        sizes = [header.get(name, 0) for name in ("num_experts", "top_k")]
        if not all(0 < size <= MAX_EXPERTS for size in sizes):
            raise ConfigError(
                f"header line {line.strip()!r:.80}, expected '# num_experts=E top_k=k' "
                f"with numbers from 1 to {MAX_EXPERTS}"
            )
    first, _, body = text.partition("\n")
    names = [name.strip() for name in first.split(",")]
    held = [*names, "request"] if "turn" in names else names
    if missing := [name for name in NEEDED if name not in held]:
        raise ConfigError(
            f"it lacks the columns {', '.join(missing)}; its first line is "
            f"{first.strip()[:80]!r}"
        )
    if not body.strip():
        raise ConfigError("it is empty: no line after the column names")
    return header, names, body


def _num_experts(stated: int | None, given: int | None) -> int:
    if given is not None:
        check_count("num_experts", given)
        if given > MAX_EXPERTS:
            raise ConfigError(
                f"--num_experts is {given}, expected at most {MAX_EXPERTS}"
            )
    elif stated is None:
        raise ConfigError(
            "it does not say how many experts a layer has: give --num_experts"
        )
    if None not in (stated, given) and stated != given:
        raise ConfigError(
            f"it says num_experts={stated}, --num_experts says {given}; leave the flag "
            "out"
        )
    return stated or given


def _numbers(names: list[str], body: str) -> np.ndarray:
    try:
        table = np.loadtxt(io.StringIO(body), delimiter=",", ndmin=2, comments=None)
    except ValueError as error:
        raise ConfigError(str(error).split(";")[0]) from error
    if table.shape[1] != len(names):
        raise ConfigError(
            f"{table.shape[1]} values a line, expected {len(names)}: {', '.join(names)}"
        )
    for line, column in np.argwhere(~np.isfinite(table)):
        raise ConfigError(
            f"row {line}: {names[column]} is {table[line, column]}, expected a finite "
            "number"
        )
    return table


def _check_whole(name: str, column: np.ndarray, above: int) -> None:
    good = (column == np.floor(column)) & (column >= 0) & (column < above)
    for row in np.flatnonzero(~good):
        hint = "; check --num_experts" if name == "expert" else ""
        raise ConfigError(
            f"row {row}: {name} {column[row]:g}, expected a whole number in "
            f"0..{above - 1}{hint}"
        )


def _run_steps(columns: dict[str, np.ndarray]) -> np.ndarray:
    """Steps of the run, where each turn of a public file starts again at 0."""
    step, first = columns["step"].copy(), 0
    for turn in np.unique(columns["request"]):
        of_turn = columns["request"] == turn
        step[of_turn] += first
        first = step[of_turn].max() + 1
    return step


def _trace(path: Path, columns: dict, num_experts: int, top_k: int | None) -> Trace:
    rank = columns["rank"].astype(np.int32)
    starts = np.flatnonzero(rank == 0)
    k = top_k or int(rank.max()) + 1
    if k > num_experts:
        raise ConfigError(f"top_k is {k}, expected at most the {num_experts} experts")
    _check_ranks(columns, rank, starts, k, exact=top_k is None)
    _check_once(columns, starts)
    if rank.max() + 1 < k:
        raise ConfigError(
            f"its header line says top_k={k}, but no token has more than "
            f"{rank.max() + 1} experts; correct the header line"
        )
    row = np.cumsum(rank == 0) - 1

    def by_rank(name: str, dtype, empty=0) -> np.ndarray:
        array_TK = np.full((len(starts), k), empty, dtype)
        array_TK[row, rank] = columns[name]
        return array_TK

    ids_TK = by_rank("expert", np.int32, -1)
    sorted_TK = np.sort(ids_TK, axis=1)
    twice_TK = (sorted_TK[:, 1:] == sorted_TK[:, :-1]) & (sorted_TK[:, 1:] >= 0)
    for token in np.flatnonzero(twice_TK.any(axis=1)):
        raise ConfigError(
            f"row {starts[token]}: the token's experts {ids_TK[token].tolist()} hold "
            "one twice"
        )
    names = [*KEYS, *(n for n in ("server", "version") if n in columns)]
    keys = {name: columns[name][starts].astype(np.int32) for name in names}
    costs = {f"{n}_TK": by_rank(n, kind) for n, kind in COSTS.items() if n in columns}
    if "holder" in columns:
        costs["holder_TK"] = by_rank("holder", np.int32, -1)
    # Scores are stored in the order of the rows of the file, as they are here.
    return ordered_trace(
        num_experts,
        k,
        **keys,
        ids_TK=ids_TK,
        weights_TK=by_rank("weight", np.float32),
        scores_TE=_read_scores(path, ids_TK, num_experts),
        **costs,
    )


def _check_ranks(columns, rank, starts, k: int, exact: bool) -> None:
    """Refuses tokens whose ranks are not 0..k-1 (fewer, unless `exact`)."""
    keys = np.stack([columns[name] for name in KEYS], axis=1)
    follows = (np.diff(rank) == 1) & (np.diff(keys, axis=0) == 0).all(axis=1)
    good = np.concatenate([[rank[0] == 0], (rank[1:] == 0) | follows]) & (rank < k)
    if exact and good.all():
        ends = np.append(starts[1:], len(rank)) - 1
        good[ends] = rank[ends] == k - 1
    for bad in np.flatnonzero(~good):
        where = ", ".join(f"{name} {columns[name][bad]:g}" for name in KEYS)
        raise ConfigError(
            f"row {bad}: rank {rank[bad]} of {where}; the lines of a token must follow "
            f"each other with ranks 0..{k - 1}"
        )


def _check_once(columns: dict[str, np.ndarray], starts: np.ndarray) -> None:
    """Refuses a token that comes twice: a request has one in a step and layer."""
    names = [*KEYS, *(name for name in ("server",) if name in columns)]
    keys = np.stack([columns[name][starts] for name in names], axis=1)
    order = np.lexsort(keys.T)
    same = (np.diff(keys[order], axis=0) == 0).all(axis=1)
    for bad in np.sort(order[1:][same])[:1]:
        where = ", ".join(f"{n} {v:g}" for n, v in zip(names, keys[bad], strict=True))
        raise ConfigError(
            f"row {starts[bad]}: {where} comes twice; expected each token of a "
            "request once a layer: remove the repeated lines"
        )


def ids_crc32(ids_TK: np.ndarray) -> int:
    """Ties a file of scores to its trace."""
    return zlib.crc32(np.ascontiguousarray(ids_TK, np.int32).tobytes())


def _read_scores(path: Path, ids_TK: np.ndarray, num_experts: int):
    """Scores next to the trace, or None where there are none or of another trace."""
    scores_path = path.with_name(SCORES_FILE)
    if not scores_path.is_file():
        return None
    try:
        with scores_path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            if int(file["ids_crc32"]) != ids_crc32(ids_TK):
                return None
            scores_TE = file["scores"]
    except (KeyError, ValueError, OSError, zipfile.BadZipFile, *HEADER_ERRORS) as error:
        raise ConfigError(f"its {SCORES_FILE} cannot be read: {error}") from error
    expected = (len(ids_TK), num_experts)
    if scores_TE.shape != expected or scores_TE.dtype != np.float16:
        raise ConfigError(
            f"its {SCORES_FILE} is {scores_TE.dtype} {scores_TE.shape}, expected "
            f"float16 {expected}; write the trace again"
        )
    return scores_TE

"""When requests come: Poisson processes and the Azure and Mooncake traces."""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moe_edge.core.checks import (
    ConfigError,
    RequestError,
    check_count,
    check_known,
    check_positive,
    one_or_each,
)
from moe_edge.core.json_reader import json_objects
from moe_edge.workload.requests import Request

TRACES = {
    "azure_conv": "traces/azure_conv.csv",
    "azure_code": "traces/azure_code.csv",
    "mooncake": "traces/mooncake_conversation.csv",
}
COLUMNS = ("arrival_s", "input_tokens", "output_tokens")
PREFIX_BLOCK_TOKENS = 512  # of a prompt, behind each of its `prefix_block_ids`


def poisson_servers(
    intervals_s: float | Sequence[float],
    num_servers: int,
    count: int,
    seed: int = 0,
) -> list[np.ndarray]:
    """Poisson arrivals of every server, `count` each; exponential gaps.

    Args:
      intervals_s: mean gap, one for all servers or one each; Prism's "10 s Poisson
        arrival" is 10.
    Returns:
      float64 [count] seconds of each server.
    Raises:
      ConfigError: an interval (the inverse of a rate) that is not above 0.
    """
    check_count("count", count)
    each = one_or_each("arrival interval_s", intervals_s, num_servers).tolist()
    for interval_s in each:
        check_positive("arrival interval_s", interval_s)
    return [
        np.random.default_rng([seed, server]).exponential(interval_s, count).cumsum()
        for server, interval_s in enumerate(each)
    ]


def read_arrivals(path: str | Path) -> np.ndarray:
    """float64 [requests, 3]: COLUMNS of a trace file.

    Raises:
      RequestError: another content; OSError: the file cannot be read.
    """
    path = Path(path)
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        names = reader.fieldnames or ()
        missing = [name for name in COLUMNS if name not in names]
        if missing:
            raise RequestError(
                f"request trace {path} has no column {', '.join(missing)}; its first "
                f"line is {','.join(names) or 'empty'}"
            )
        try:
            rows = [[float(row[name]) for name in COLUMNS] for row in reader]
        except (TypeError, ValueError) as error:
            raise RequestError(
                f"request trace {path}, line {reader.line_num}: {error}; expected "
                "numbers"
            ) from error
    if not rows:
        raise RequestError(f"request trace {path} has no request")
    table = np.array(rows)
    _check_rows(path, table)
    return table


def trace_requests(
    path: str | Path,
    domains: Sequence[str],
    *,
    count: int | None = None,
    seed: int = 0,
    speed: float = 1.0,
    most_tokens: int | None = None,
) -> list[Request]:
    """Requests as a trace file has them, each at a server drawn by `seed`.

    Args:
      domains: one a server.
      count: how many; None: all.
      speed: above 1 they come so much faster.
      most_tokens: longer prompts and answers are cut.
    Raises:
      RequestError: a bad trace (`read_arrivals`), or one shorter than `count`.
    """
    check_positive("trace speed", speed)
    table = read_arrivals(path)
    if count is not None:
        check_count("count", count)
        if count > len(table):
            raise RequestError(
                f"request trace {path} has {len(table)} requests, {count} were asked "
                "for; ask for fewer"
            )
        table = table[:count]
    rng = np.random.default_rng(seed)
    servers = rng.integers(len(domains), size=len(table))
    tokens = table[:, 1:].astype(np.int64)
    if most_tokens is not None:
        tokens = np.minimum(tokens, most_tokens)
    return [
        Request(i, int(n), float(t / speed), int(k[0]), int(k[1]), domains[n])
        for i, (n, t, k) in enumerate(zip(servers, table[:, 0], tokens, strict=True))
    ]


def read_prefix_blocks(path: str | Path, count: int) -> list[tuple[int, ...]]:
    """Which blocks the prompts of a trace begin with; (): nothing is known of them.

    Args:
      path: JSON lines beside the trace; a trace may have none.
      count: requests of the trace.
    Raises:
      RequestError: another content, or the file cannot be read.
    """
    path = Path(path)
    if not path.exists():
        return [()] * count
    blocks = []
    for where, row in json_objects(path, RequestError):
        ids = row.get("prefix_block_ids")
        if not isinstance(ids, list) or not all(type(id) is int for id in ids):
            raise RequestError(
                f"{where}: prefix_block_ids is {ids!r:.60}, expected whole numbers"
            )
        blocks.append(tuple(ids))
    if len(blocks) != count:
        raise RequestError(
            f"{path} has {len(blocks)} requests, the trace beside it {count}"
        )
    return blocks


def trace_path(name: str, data_dir: str | Path | None) -> Path:
    """Where a named trace lies; ConfigError for another name or no data folder."""
    check_known("request trace", name, TRACES)
    if data_dir is None:
        raise ConfigError(f"request trace {name} needs --data_dir")
    return Path(data_dir) / TRACES[name]


def _check_rows(path: Path, table: np.ndarray) -> None:
    times, tokens = table[:, 0], table[:, 1:]
    if not np.isfinite(table).all():
        raise RequestError(f"request trace {path} holds what is no finite number")
    if times[0] < 0:
        raise RequestError(f"request trace {path} begins at {times[0]} s, below 0")
    falls = np.flatnonzero(np.diff(times) < 0)
    if len(falls):
        i = int(falls[0]) + 1
        raise RequestError(
            f"request trace {path} is out of order: request {i} arrives at "
            f"{times[i]} s, the one before at {times[i - 1]} s; sort it by arrival_s"
        )
    if (tokens < 1).any() or (tokens % 1).any():
        i = int(np.flatnonzero((tokens < 1).any(1) | (tokens % 1).any(1))[0])
        raise RequestError(
            f"request trace {path}, request {i}: {tokens[i, 0]:g} input and "
            f"{tokens[i, 1]:g} output tokens; expected whole numbers above 0"
        )

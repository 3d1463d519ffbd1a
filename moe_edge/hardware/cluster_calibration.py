"""What a real cluster was measured to need: the `calibration.json` of its run.

A server runs few compiled programs, one a bucket of tokens (1 = decoding), so costs are
stated a bucket; a step of another size costs what the next larger bucket costs. Every
number is in seconds while one server has requests, software included. The more servers
have requests, the slower are all: `compute_slowdown`, `message_slowdown`.

A layer of a step, of which m other servers compute a part, takes

    dense_s                            attention, router, shared expert, planning
    + split_s                          if m > 0
    + the longer of own blocks
      and m * each_s + base_s + bytes  messages there and back
          + call_s + blocks            at each server that was called

where blocks are (number of blocks) * block_s + (token, block) pairs * pair_s. All own
blocks: dense_s + own blocks. A step ends with `head_s`.

A server answers calls in a thread of its own, one after another. Servers of one machine
share its cores.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_edge.core.checks import (
    ConfigError,
    check_count,
    check_from_zero,
    check_positive,
)
from moe_edge.core.files import write_json
from moe_edge.core.json_reader import read_json
from moe_edge.core.typed import built

CALIBRATION_FILE = "calibration.json"
FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketCosts:
    """Steps of up to `tokens` tokens on one server; seconds.

    Attributes:
      tokens: size of the bucket; prompts beyond the largest come in chunks of it.
      dense_s: a layer without its routed experts.
      head_s: once a step: embedding, head, sampling, the host's work between steps.
      split_s: a layer more, if others compute a part of it: finding out who, joining
        rows.
      call_s: a call of another server, whatever the number of its blocks; without
        messages.
      block_s, pair_s: more for each block, and for each of its (token, block) pairs.
    """

    tokens: int
    dense_s: float
    pair_s: float
    head_s: float = 0.0
    split_s: float = 0.0
    call_s: float = 0.0
    block_s: float = 0.0

    def __post_init__(self):
        check_count("bucket tokens", self.tokens)
        for field in dataclasses.fields(self)[1:]:
            name = f"{field.name} of bucket {self.tokens}"
            check_from_zero(name, getattr(self, field.name))
        check_positive(f"dense_s of bucket {self.tokens}", self.dense_s)
        check_positive(
            f"block_s + pair_s of bucket {self.tokens}", self.block_s + self.pair_s
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerCosts:
    """One server.

    Attributes:
      buckets: in rising order, from 1 token on.
      load_s: a block from its checkpoint or host memory into a slot.
    """

    buckets: Sequence[BucketCosts]
    load_s: float

    def __post_init__(self):
        check_positive("load_s", self.load_s)
        sizes = [bucket.tokens for bucket in self.buckets]
        if sizes[:1] != [1] or sizes != sorted(set(sizes)):
            raise ConfigError(
                f"buckets are of {sizes} tokens, expected rising sizes from 1 on"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Messages:
    """What a call costs on its way, there and back together.

    Attributes:
      base_s, each_s: a layer that calls m servers at once waits base_s + m * each_s
        for empty messages: each_s keeps the caller busy, base_s passes meanwhile.
      bytes_per_s: of what a server sends (its line), without the software above.
      call_bytes: header of a call and of its answer together.
      token_bytes: a hidden state that is sent, once for all of a call's blocks.
      pair_bytes: sent for each (token, block) pair.
      row_bytes: of a row that returns.
    """

    base_s: float
    each_s: float
    bytes_per_s: float
    call_bytes: int
    token_bytes: int
    pair_bytes: int
    row_bytes: int

    def __post_init__(self):
        check_positive("bytes_per_s", self.bytes_per_s)
        for name in ("base_s", "each_s", "call_bytes", "pair_bytes"):
            check_from_zero(name, getattr(self, name))
        for name in ("token_bytes", "row_bytes"):
            check_count(name, getattr(self, name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterCalibration:
    """A measured cluster.

    Attributes:
      servers: by number; all with the same sizes of buckets.
      messages: between any two of them.
      source: how it was measured, and on what.
      hosts: of every server the machine it runs on; empty: each on one of its own.
      cores: of every machine; empty: one each.
      compute_slowdown: how many times as long computation takes while 1, 2, .. servers
        have requests; more than are listed count as the last; empty: always once.
      message_slowdown: the same of base_s and each_s of `messages`.
    """

    servers: Sequence[ServerCosts]
    messages: Messages
    source: str
    hosts: Sequence[int] = ()
    cores: Sequence[int] = ()
    compute_slowdown: Sequence[float] = ()
    message_slowdown: Sequence[float] = ()

    def __post_init__(self):
        if not self.servers:
            raise ConfigError("a calibration needs at least one server, got none")
        if not self.hosts:
            object.__setattr__(self, "hosts", list(range(len(self.servers))))
        if not self.cores:
            object.__setattr__(self, "cores", [1] * (max(self.hosts, default=0) + 1))
        for count in self.cores:
            check_count("cores of a machine", count)
        for name in ("compute_slowdown", "message_slowdown"):
            if not getattr(self, name):
                object.__setattr__(self, name, [1.0])
            for times in getattr(self, name):
                check_positive(name, times)
        known = range(len(self.cores))
        if len(self.hosts) != len(self.servers) or set(self.hosts) - set(known):
            raise ConfigError(
                f"hosts are {list(self.hosts)}, expected one of {len(self.cores)} "
                f"machines for each of {len(self.servers)} servers"
            )
        for server, costs in enumerate(self.servers):
            sizes = [bucket.tokens for bucket in costs.buckets]
            if sizes != self.sizes:
                raise ConfigError(
                    f"server {server} has buckets of {sizes} tokens, server 0 of "
                    f"{self.sizes}; measure the same ones everywhere"
                )

    @property
    def sizes(self) -> list[int]:
        """Tokens of each bucket."""
        return [bucket.tokens for bucket in self.servers[0].buckets]

    def save(self, folder: str | Path, name: str = CALIBRATION_FILE) -> None:
        """Writes `calibration.json`, or a file of another name."""
        stored = {"format_version": FORMAT_VERSION} | dataclasses.asdict(self)
        write_json(Path(folder) / name, stored)

    @classmethod
    def load(
        cls, folder: str | Path, name: str = CALIBRATION_FILE
    ) -> "ClusterCalibration":
        """Reads what `save` wrote.

        Raises:
          ConfigError: other keys or values, another version, or the file cannot be
            read.
        """
        path = Path(folder) / name
        stored = read_json(path)
        try:
            return cls.from_json(stored)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}; run the cluster again") from error

    @classmethod
    def from_json(cls, stored: Any) -> "ClusterCalibration":
        """From the parsed file.

        Raises:
          ConfigError: other keys or values, or another version.
        """
        version = stored.get("format_version") if isinstance(stored, dict) else None
        if version != FORMAT_VERSION:
            raise ConfigError(f"format_version is {version}, expected {FORMAT_VERSION}")
        given = {name: x for name, x in stored.items() if name != "format_version"}
        if isinstance(servers := given.get("servers"), list):
            given["servers"] = [
                _server(number, server) for number, server in enumerate(servers)
            ]
        if "messages" in given:
            messages = given["messages"]
            if isinstance(messages, dict) and messages.get("partial") is False:
                messages = {k: v for k, v in messages.items() if k != "partial"}
            given["messages"] = built("messages", Messages, messages)
        return built("calibration", cls, given)


def _server(number: int, stored: Any) -> ServerCosts:
    name = f"server {number}"
    if isinstance(stored, dict) and isinstance(stored.get("buckets"), list):
        each = [built(f"{name}: bucket", BucketCosts, b) for b in stored["buckets"]]
        stored = stored | {"buckets": each}
    return built(name, ServerCosts, stored)

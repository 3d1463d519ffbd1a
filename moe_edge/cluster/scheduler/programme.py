"""What the runs of both modes begin with and leave."""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.cluster.model_checks import open_at_k
from moe_edge.cluster.options import ClusterOptions
from moe_edge.cluster.scheduler.requests import ClusterRequest
from moe_edge.cluster.scheduler.scheduler import Scheduler
from moe_edge.cluster.scheduler.wanted import Wanted, wanted_of
from moe_edge.convert.text_stream import decode_after
from moe_edge.convert.tokenizer import load_tokenizer
from moe_edge.workload.cluster_run import RequestRow

WARM_S = 600.0  # compiling on a slow machine


class Programme:
    """One run of the cluster.

    Attributes:
      scheduler: talks to the other processes; a subclass makes it.
    """

    scheduler: Scheduler

    def __init__(self, options: ClusterOptions, folder: Path):
        self.options, self.folder = options, folder
        self.reader = open_at_k(options)
        self.config = self.reader.config
        self.tokenizer = load_tokenizer(self.reader)

    @functools.cached_property
    def wanted(self) -> Wanted:
        """What is asked for."""
        return wanted_of(self.options, self.tokenizer, self.config.max_positions)

    @property
    def block_bytes(self) -> int:
        return self.reader.layout.num_bytes(self.reader.dtype)

    def fresh(self) -> list[ClusterRequest]:
        """All requests, not served yet."""
        return [one.fresh() for one in self.wanted.asked]

    def warm_up(self, fields: Mapping[str, Any] | None = None, **sizes: set) -> float:
        """All processes compile what such sizes need: the longest one's seconds.

        Args:
          fields: what else they must know.
        Raises:
          NobodyLeft: one is lost before it is done.
        """
        arrays = {
            name: np.array(sorted(some), np.int32) for name, some in sizes.items()
        }
        self.scheduler.tell_all("warm", dict(fields or {}), arrays)
        said = self.scheduler.wait_for_all("warm", WARM_S, may_lose=False)
        return max(fields["seconds"] for fields in said.values())

    def write_texts(self, asked: Sequence[ClusterRequest]) -> None:
        """`generations.jsonl`: a line a request, in order of arrival."""
        lines = []
        for one, text in zip(asked, self.wanted.texts, strict=True):
            said = decode_after(self.tokenizer, list(one.prompt), one.tokens)
            line = {"id": text.id, "text": said, "tokens": one.tokens}
            line["server"] = one.home
            if one.error is not None:
                line["error"] = one.error
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        (self.folder / "generations.jsonl").write_text("".join(lines), encoding="utf-8")


def served_rows(asked: Sequence[ClusterRequest]) -> list[RequestRow]:
    """A line a request, times from its arrival."""
    rows = []
    for one in asked:
        first = last = float("nan")
        if one.done:
            first = one.times_s[0] - one.arrived_s
            last = one.times_s[-1] - one.arrived_s
        rows.append(RequestRow(one.home, one.domain, one.arrival_s, first, last))
    return rows

"""What both modes write of their requests."""

import json
from collections.abc import Sequence
from pathlib import Path

from moe_edge.cluster.scheduler.requests import ClusterRequest
from moe_edge.convert.text_stream import decode_after
from moe_edge.convert.tokenizer import Tokenizer
from moe_edge.engine.prompts import Prompt
from moe_edge.workload.cluster_run import RequestRow


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


def write_texts(
    folder: Path,
    asked: Sequence[ClusterRequest],
    texts: Sequence[Prompt],
    tokenizer: Tokenizer,
) -> None:
    """`generations.jsonl`: a line a request, in order of arrival."""
    lines = []
    for one, text in zip(asked, texts, strict=True):
        completion = decode_after(tokenizer, list(one.prompt), one.tokens)
        line = {"id": text.id, "text": completion, "tokens": one.tokens}
        line["server"] = one.home
        if one.error is not None:
            line["error"] = one.error
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    (folder / "generations.jsonl").write_text("".join(lines), encoding="utf-8")

"""SMoE, figure 11: the workloads, and their prompts."""

import dataclasses
from pathlib import Path

from moe_edge.bench.prompts import make_pool
from moe_edge.bench.started import start_number
from moe_edge.core.checks import RequestError
from moe_edge.papers.smoe.studies.systems import Fig11Settings


def workloads_of(settings: Fig11Settings) -> dict[str, Fig11Settings]:
    """By name, settings whose prompts come from that workload."""
    if settings.data_dir is None:
        return {"books": settings}
    return {
        name_of(source): dataclasses.replace(settings, sources=(source,))
        for source in settings.sources
    }


def name_of(source: str) -> str:
    """A workload's name."""
    return Path(source).name.split(".")[0]


def unseen_rounds(settings: Fig11Settings, tokenizer, seen: set) -> list[list[list]]:
    """Rounds of a workload's prompts, none of them among those seen; each start passes
    over those of the starts before.

    Raises:
      RequestError: its file does not hold so many.
    """
    widest = max(settings.batches)
    wanted, tokens = widest * settings.rounds, settings.prompt_tokens
    before = wanted * (start_number() or 0)
    most = before + wanted + len(seen)
    pool = make_pool(settings, tokenizer, most, tokens, at_most=True, before=0)
    rows = [row for row in pool.rows if tuple(row) not in seen][before:][:wanted]
    if len(rows) < wanted:
        raise RequestError(
            f"{settings.sources[0]} holds {len(rows)} prompts of {tokens} tokens that "
            f"nothing has learnt from, {wanted} are needed; lower history, rounds, "
            "starts or batches"
        )
    return [rows[n : n + widest] for n in range(0, wanted, widest)]

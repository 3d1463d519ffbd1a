"""SMoE, figure 11: the workloads, and their prompts."""

import dataclasses
from pathlib import Path

from moe_edge.bench.cases import past_prompts, prompts_of
from moe_edge.bench.prompts import forced_pool, make_pool, tokenizer_of
from moe_edge.bench.started import start_number
from moe_edge.convert.hf_config import random_seed
from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.tokenizer import Tokenizer
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


def unseen_rounds(
    settings: Fig11Settings, tokenizer: Tokenizer, seen: set
) -> list[list[list]]:
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


def rounds_of(
    settings: Fig11Settings, tokenizer: Tokenizer
) -> dict[str, tuple[Fig11Settings, list[list[list]]]]:
    """By workload, its settings and its `unseen_rounds`: of prompts from which engines
    neither learn nor warm up."""
    pool, _ = prompts_of(settings, tokenizer, max(settings.batches))
    learnt = past_prompts(settings, tokenizer).rows
    seen = {tuple(row) for row in (*learnt, *pool.rows)}
    return {
        name: (one, unseen_rounds(one, tokenizer, seen))
        for name, one in workloads_of(settings).items()
    }


def check_workloads(settings: Fig11Settings) -> None:
    """Refuses files without enough prompts (RequestError), before weights are read."""
    tokenizer = tokenizer_of(settings)
    is_random = random_seed(open_checkpoint(settings.checkpoint).config) is not None
    for one, _ in rounds_of(settings, tokenizer).values():
        if not is_random:  # whose fidelity is not judged
            forced_pool(one, tokenizer, settings.fidelity_rows)

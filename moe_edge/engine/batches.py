"""Prompts in batches of few shapes, warmed up, then generated and timed."""

from collections.abc import Sequence

import numpy as np

from moe_edge.engine.base import Engine
from moe_edge.engine.generate import Generation, TokenCallback, generate, warm_up
from moe_edge.engine.session import capacity_for, plan_chunks
from moe_edge.model.sampling import Sampling


def even_batches(count: int, batch_size: int) -> list[range]:
    """Splits 0 .. count-1 into few batches of nearly equal size: few shapes."""
    batches = -(-count // batch_size)
    edges = [count * i // batches for i in range(batches + 1)]
    return [range(*edges[i : i + 2]) for i in range(batches)]


def shape_of(rows, max_new_tokens: int) -> tuple:
    """What decides which programs a batch needs."""
    longest = max(map(len, rows))
    capacity = capacity_for(longest + max_new_tokens)
    sizes = {size for _, size in plan_chunks(longest, capacity)}
    return len(rows), capacity, frozenset(sizes)


def speed_of(generations: Sequence[Generation]) -> dict[str, float]:
    """Decoded tokens per second and mean time to first token of several batches."""
    decoded = sum(len(row) - 1 for done in generations for row in done.tokens)
    decode_s = sum(done.decode_s for done in generations)
    return {
        "tokens_per_s": decoded / decode_s if decode_s > 0 else 0.0,
        "ttft_s": float(np.mean([done.ttft_s for done in generations])),
    }


def generate_rows(
    engine: Engine,
    rows: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    batch_size: int = 8,
    on_token: TokenCallback | None = None,
    on_routing=None,
) -> tuple[list[list[int]], dict[str, float]]:
    """New tokens of every row, and the speed without compilation.

    Every shape of batch is run once before anything is timed: `warm_up_s` in the
    returned numbers is what that took, compilation above all. Then slots are emptied
    and counters reset: times, hits and bytes count from one moment, with no block of
    these prompts on the device yet.
    """
    batches = even_batches(len(rows), batch_size)
    shapes = {
        shape_of([rows[i] for i in batch], max_new_tokens): batch
        for batch in reversed(batches)
    }
    warm_up_s = 0.0
    for batch in reversed(shapes.values()):
        chosen = [rows[i] for i in batch]
        warm_up_s += warm_up(engine, chosen, max_new_tokens, sampling)
    engine.restart()
    tokens, done = [], []
    for batch in batches:
        result = generate(
            engine,
            [rows[i] for i in batch],
            max_new_tokens,
            sampling=sampling,
            stop_ids=engine.config.eos_ids,
            row_ids=batch,
            on_token=on_token,
            on_routing=on_routing,
        )
        done.append(result)
        tokens += result.tokens
    return tokens, speed_of(done) | {"warm_up_s": warm_up_s}

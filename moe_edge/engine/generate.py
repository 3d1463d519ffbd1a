"""Generation: prefill, then decode steps until every row has ended.

One loop for every engine mode. Many prompts go in batches of few shapes, warmed up
before anything is timed.
"""

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Generator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.core.checks import check_count
from moe_edge.core.interrupts import check_interrupt, held_interrupts
from moe_edge.core.progress import progress
from moe_edge.engine.base import Engine
from moe_edge.engine.session import check_prompts, plan_chunks
from moe_edge.engine.sizes import capacity_for
from moe_edge.model.sampling import Sampling, sample

# Called with (row, token id) as soon as a token is known; True ends the row.
TokenCallback = Callable[[int, int], bool | None]


@dataclasses.dataclass(frozen=True)
class Generation:
    """New tokens of each row and what they took."""

    tokens: list[list[int]]  # without the prompt; a stop token ends a row and is kept
    ttft_s: float  # seconds from the call to the first token
    decode_s: float  # seconds of all later steps
    steps: int  # how many later steps there were


@functools.partial(jax.jit, static_argnames="sampling")
def next_token(logits_BV, keys_B, step, sampling):
    """int32 [B]: what each row draws at a step, by its own key."""
    keys_B = jax.vmap(jax.random.fold_in, (0, None))(keys_B, step)
    return sample(logits_BV, keys_B, sampling)


def warm_up(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
) -> float:
    """Compiles all that `generate` runs for these prompts; returns its seconds."""
    started, tokens = time.perf_counter(), collections.Counter()

    def ends(row: int, token: int) -> bool:
        tokens[row] += 1
        return tokens[row] == 2

    generate(engine, prompts, max_new_tokens, sampling=sampling, on_token=ends)
    return time.perf_counter() - started


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step gave.

    Attributes:
      new: (row, token id) of every row that had not ended.
      began_s: `time.perf_counter()` when the prompts began to run.
      at_s: the same once these tokens were known.
      logits_BV: of the latest step that was begun.
    """

    new: list[tuple[int, int]]
    began_s: float
    at_s: float
    logits_BV: jax.Array


def generate_steps(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    stop_ids: Sequence[int] = (),
    row_ids: Sequence[int] | None = None,
    on_token: TokenCallback | None = None,
    on_routing=None,
) -> Generator[Step]:
    """As `generate`, step by step; the session ends with the iterator."""
    check_count("max_new_tokens", max_new_tokens)
    longest = max(check_prompts(prompts, engine.config.vocab_size))
    sampling = sampling or Sampling()
    row_ids = range(len(prompts)) if row_ids is None else row_ids
    # A key for each row, from the seed and the row's id alone; the seed is then no
    # reason to compile again.
    ids_B, key = jnp.asarray(list(row_ids), jnp.uint32), jax.random.key(sampling.seed)
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, ids_B)
    rule = dataclasses.replace(sampling, seed=0)
    began_s = time.perf_counter()
    session = engine.new_session(len(prompts), longest + max_new_tokens)
    logits = engine.prefill(session, prompts, on_routing)
    active = np.ones(len(prompts), bool)
    active_B = engine.put(active.copy())  # a put may alias what we change
    # As row slots do: after the first token the next step begins before the tokens of
    # this one are read. If a row then ends, its step is discarded and its routing not
    # recorded.
    may_run_ahead = engine.may_run_ahead and on_routing is None
    step = 0
    while True:
        check_interrupt()
        tokens_B = next_token(logits, keys_B, np.int32(step), rule)
        step += 1
        runs_ahead = may_run_ahead and 1 < step < max_new_tokens
        if runs_ahead:
            logits = engine.decode(session, tokens_B, active_B)
        before, new = active.copy(), []
        for row, token in enumerate(np.asarray(tokens_B).tolist()):
            if active[row]:
                new.append((row, token))
                active[row] = token not in stop_ids
                if on_token is not None and on_token(row, token):
                    active[row] = False
        yield Step(new, began_s, time.perf_counter(), logits)
        if step == max_new_tokens or not active.any():
            return
        if (active != before).any():
            active_B = engine.put(active.copy())
        if not runs_ahead:
            logits = engine.decode(session, tokens_B, active_B, on_routing)


@held_interrupts()
def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    stop_ids: Sequence[int] = (),
    row_ids: Sequence[int] | None = None,
    on_token: TokenCallback | None = None,
    on_routing=None,
) -> Generation:
    """Continues every prompt by up to `max_new_tokens` tokens.

    Args:
      engine: of any mode.
      prompts: token ids of each row; lengths may differ.
      max_new_tokens: upper bound per row.
      sampling: greedy by default.
      stop_ids: tokens that end a row.
      row_ids: decide, with the seed, what each row draws (default 0, 1, ...); a
        caller that splits its prompts into batches gives each its own.
      on_token: receives every new token, and may end its row by returning True.
      on_routing: receives (layer, Routing) of every step, prefill included.
    Raises:
      RequestError: an empty prompt or a token outside the vocabulary.
      CapacityError: prompt and new tokens exceed the model's context.
      KeyboardInterrupt: after Ctrl-C, between two steps: the engine can go on. A second
        Ctrl-C does not wait for the step.
    """
    times_s = []
    steps = generate_steps(
        engine,
        prompts,
        max_new_tokens,
        sampling=sampling,
        stop_ids=stop_ids,
        row_ids=row_ids,
        on_token=on_token,
        on_routing=on_routing,
    )
    rows: dict[int, list[int]] = collections.defaultdict(list)
    for step in steps:
        for row, token in step.new:
            rows[row].append(token)
        times_s.append(step.at_s)
    jax.block_until_ready(step.logits_BV)  # nothing of this call outlasts it
    first_s, last_s = times_s[0], times_s[-1]
    ttft_s = first_s - step.began_s
    return Generation([*rows.values()], ttft_s, last_s - first_s, len(times_s) - 1)


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
    check_count("max_new_tokens", max_new_tokens)
    check_count("batch_size", batch_size)
    batches = even_batches(len(rows), batch_size)
    shapes = {
        shape_of([rows[i] for i in batch], max_new_tokens): batch
        for batch in reversed(batches)
    }
    warm_up_s = 0.0
    for batch in progress([*reversed(shapes.values())], "compiling for batches"):
        chosen = [rows[i] for i in batch]
        warm_up_s += warm_up(engine, chosen, max_new_tokens, sampling)
    engine.restart()
    tokens, done = [], []
    for batch in progress(batches, "batches generated", shown=on_token is None):
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

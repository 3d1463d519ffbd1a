"""Times steps of row slots, as they run in a server: the request loop decides before
each of them."""

import itertools
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.core.progress import progress
from moe_edge.engine.slot_rows import SlotRow
from moe_edge.engine.slots import RowSlots
from moe_edge.hardware.step_costs import Shape
from moe_edge.schedule.continuous import Continuous
from moe_edge.schedule.loop import RequestLoop
from moe_edge.schedule.request import Request

PROMPT_TOKENS = 96  # of rows that decode
STEPS = 3  # in a row at one setting; the first is not timed
STEPS_OF_ROWS = 5  # until one of them ends


class StepTimer:
    """Times steps of a running batch.

    Attributes:
      sizes: prompt tokens at which a step's shape changes (the last of one and the
        first of the next), and halfway between.
      prompt_tokens: of rows that decode.
    """

    def __init__(self, slots: RowSlots, vocab_size: int, repeats: int, seed: int):
        self._slots, self._vocab, self._repeats = slots, vocab_size, repeats
        self._loop = RequestLoop(Continuous(slots.shapes.max_rows))
        self._rng = np.random.default_rng(seed)
        context, shape = slots.shapes.max_context, slots.shapes.prompt_shape
        most = min(slots.shapes.chunks[-1], context - 1)
        changes = [n for n in range(1, most) if shape([n]) != shape([n + 1])]
        edges = sorted({1, most, *changes, *(n + 1 for n in changes)})
        middles = [(low + high) // 2 for low, high in itertools.pairwise(edges)]
        self.sizes = sorted({*edges[1:], *middles})
        self.prompt_tokens = min(PROMPT_TOKENS, context // 2)
        self._new_tokens = context - self.prompt_tokens

    def decode(
        self, settings: Mapping[int, Sequence[Sequence[int]]]
    ) -> dict[int, list[list[float]]]:
        """Seconds of steps at each setting.

        Args:
          settings: number of rows -> settings: a K for each of them.
        """
        longest = STEPS * max(map(len, settings.values()))
        if longest >= self._new_tokens:
            raise ConfigError(
                f"a context of {self.prompt_tokens + self._new_tokens} tokens is too "
                f"short to time {longest} steps; take a model with a longer one"
            )
        self.keys_of_rows = self.prompt_tokens + longest / 2
        times: dict[int, list[list[float]]]
        times = {rows: [[] for _ in each] for rows, each in settings.items()}
        rounds = progress(range(self._repeats), "rounds of decode steps timed")
        for _ in rounds:  # what disturbs a moment, disturbs all a little
            for rows, each in settings.items():
                self._decode(rows, each, times[rows], longest + 1)
        return times

    def _decode(self, rows: int, settings, times: Sequence[list], new: int) -> None:
        slots = self._slots
        self._admit([self._row(i, self.prompt_tokens, new) for i in range(rows)])
        while slots.has_prompts:
            slots.prefill()
        for setting, seen in zip(settings, times, strict=True):
            for id, k in enumerate(setting):
                slots.set_k(id, k)
            seen += [self._step(slots.decode) for _ in range(STEPS)][1:]
        self._release(range(rows))

    def changes(self) -> dict[str, float]:
        """How much longer a step takes whose rows are others than before.

        All rows join; then one after another ends, and sometimes those left move. The
        step in which one ends is shorter by what has begun ahead: it counts too.
        """
        slots, sizes = self._slots, self._slots.shapes
        most = min(sizes.max_rows, (self._new_tokens - 1) // STEPS_OF_ROWS)
        ends = [1 + STEPS_OF_ROWS * (i + 1) for i in range(most)]  # 1: the prompt's
        changed, moved = [], []
        for once in range(self._repeats + 1):
            self._admit(
                [self._row(i, self.prompt_tokens, n) for i, n in enumerate(ends)]
            )
            while slots.has_prompts:
                slots.prefill()
            for id in range(most):
                first, *others, last = [
                    self._step(slots.decode) for _ in range(STEPS_OF_ROWS)
                ]
                self._release([id])
                if once:  # the first round compiles
                    is_move = id > 0 and most - id in sizes.rows
                    seen = moved if is_move else changed
                    seen.append(first + last - 2 * statistics.median(others))
        changed_s = max(statistics.mean(changed), 0.0)
        moved_s = statistics.mean(moved) - changed_s if moved else 0.0
        return {"changed_s": changed_s, "moved_s": max(moved_s, 0.0)}

    def prefill(
        self, settings: Sequence[tuple[Sequence[int], int]]
    ) -> list[list[float]]:
        """Seconds of the one chunk of prompts of these lengths, at a K.

        They join a row that runs, if there is room: its session is made larger.
        """
        times: list[list[float]] = [[] for _ in settings]
        slots, runs = self._slots, [self._row(-1, 1, self.prompt_tokens)]
        for once in progress(range(self._repeats + 1), "rounds of prompts timed"):
            for (lengths, k), seen in zip(settings, times, strict=True):
                rows = [self._row(i, n, 1, k) for i, n in enumerate(lengths)]
                others = runs if len(rows) < slots.shapes.max_rows else []
                self._admit(others)
                slots.prefill()
                self._admit(rows)
                seconds = self._step(slots.prefill)
                if once:  # the first round compiles
                    seen.append(seconds)
                self._release([row.id for row in (*others, *rows)])
        return times

    def keys(self) -> dict[str, float]:
        """What attention to more keys takes, where it goes by keys."""
        slots, sizes = self._slots, self._slots.shapes
        B, M = sizes.rows[-1], sizes.capacities[-1]
        near, far = min(self.prompt_tokens, M // 8), M * 3 // 4
        S, largest = sizes.chunks[-1], sizes.prompt_capacities[-1]
        start, times = largest - min(S, largest), ([], [], [], [])
        for once in range(self._repeats + 1):
            seen = (
                rows_seconds(slots, (B, 1, M), B, near),
                rows_seconds(slots, (B, 1, M), B, far),
                chunk_seconds(slots, min(S, largest), 0),
                chunk_seconds(slots, min(S, largest), start),
            )
            if once:  # the first round compiles
                for each, seconds in zip(times, seen, strict=True):
                    each.append(seconds)
        few, many, first, last = map(statistics.median, times)
        key_s, prompt_key_s = (many - few) / (B * (far - near)), 0.0
        if start:
            prompt_key_s = max(last - first, 0.0) / (S * start)
        return {
            "keys": self.keys_of_rows,
            "key_s": max(key_s, 0.0),
            "prompt_key_s": prompt_key_s,
        }

    def shapes(self) -> list[list[float]]:
        """Rows, size, capacity and seconds of every shape of prompts."""
        sizes = self._slots.shapes
        return self._each(sizes.prompt_shapes(), shape_seconds)

    def batches(self) -> list[list[float]]:
        """The same of every size of a batch that decodes, of one row each."""
        sizes = self._slots.shapes
        every = itertools.product(sizes.rows, (1,), sizes.capacities)
        return self._each(set(every), rows_seconds)

    def _each(self, shapes: Collection[Shape], seconds_of) -> list[list[float]]:
        times: dict[Shape, list[float]] = {shape: [] for shape in sorted(shapes)}
        for once in progress(range(self._repeats + 1), "rounds of shapes timed"):
            for shape, seen in times.items():
                seconds = seconds_of(self._slots, shape)
                if once:  # the first round compiles
                    seen.append(seconds)
        return [[*shape, statistics.median(seen)] for shape, seen in times.items()]

    def _admit(self, rows: Sequence[SlotRow]) -> None:
        for row in rows:
            job = Request(
                row.id,
                arrival_s=0.0,
                floor=1,
                prompt_tokens=len(row.prompt),
                new_tokens=row.max_new_tokens,
            )
            self._loop.admit(job, self._loop.arrive(job, 0.0), 0.0)
        self._slots.admit(rows)

    def _release(self, ids: Iterable[int]) -> None:
        for id in ids:
            self._loop.cancel(id)
            self._slots.release(id)

    def _step(self, compute: Callable[[], Any]) -> float:
        """Seconds of a step: the loop decides, and slots compute."""

        def step() -> None:
            self._loop.begin_step(0, 0.0)
            compute()
            self._loop.end_step(0, 0.0, ())

        return _seconds(step)

    def _row(self, id: int, prompt: int, new: int, k: int | None = None) -> SlotRow:
        tokens = tuple(self._rng.integers(0, self._vocab, prompt).tolist())
        return SlotRow(id=id, prompt=tokens, max_new_tokens=new, k=k)


def shape_seconds(slots: RowSlots, shape: Shape) -> float:
    """Seconds of a chunk in a shape that holds one token, at K 1."""
    valid_RS = np.zeros(shape[:2], bool)
    valid_RS[0, 0] = True
    return _chunk_seconds(slots, shape, valid_RS, shape[1], 0)


def rows_seconds(
    slots: RowSlots, batch: Shape, rows: int = 1, position: int = 0
) -> float:
    """Seconds of a step of rows at a position in a batch, at K 1.

    Of one row at the first position: what size and capacity cost.
    """
    engine, (B, _, M) = slots.engine, batch
    session, is_there = slots.shapes.new_session(engine, B, M), np.arange(B) < rows
    session.growth = is_there.astype(int).tolist()
    positions = np.where(is_there, position, 0).astype(np.int32)
    session.lengths, session.positions_B = positions.tolist(), engine.put(positions)
    session.k_B = engine.put(np.ones(B, np.int32))
    tokens_B, active_B = engine.put((np.zeros(B, np.int32), is_there))
    steps = [
        _seconds(
            lambda: jax.block_until_ready(engine.decode(session, tokens_B, active_B))
        )
        for _ in range(STEPS)
    ]
    return min(steps[1:])


def chunk_seconds(slots: RowSlots, size: int, start: int) -> float:
    """Seconds of a whole chunk of one prompt in the largest session, at K 1."""
    M = slots.shapes.prompt_capacities[-1]
    return _chunk_seconds(slots, (1, size, M), np.ones((1, size), bool), M, start)


def _chunk_seconds(
    slots: RowSlots, shape: Shape, valid_RS: np.ndarray, prompt: int, start: int
) -> float:
    """Seconds of a chunk of prompts of so many tokens, from `start` on, at K 1."""
    engine, (R, S, M) = slots.engine, shape
    session = slots.shapes.new_session(engine, R, M)
    engine.begin_prompts(session, [[0] * prompt] * R)
    session.k_B = engine.put(np.ones(R, np.int32))
    given = np.zeros((R, S), np.int32), valid_RS, np.full(R, start, np.int32)
    jax.block_until_ready(session.caches)
    return _seconds(lambda: jax.block_until_ready(engine.run_chunk(session, *given)))


def _seconds(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start

"""Measures what the steps of a running batch cost: by rows or tokens, and by K.

Rows have random tokens: which experts they choose matters little to the time of an
engine whose experts are resident. As in a server the request loop decides before every
step. The tables are judged at points that they were not
made from: rows of different K, prompts of other lengths and several at a time.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from moe_edge.core.checks import ConfigError, check_count
from moe_edge.engine.base import Engine
from moe_edge.engine.sizes import SlotSizes
from moe_edge.engine.slot_rows import Row
from moe_edge.engine.slots import RowSlots
from moe_edge.hardware.step_costs import CostTable, Shape, StepCosts
from moe_edge.schedule.continuous import Continuous
from moe_edge.schedule.loop import RequestLoop
from moe_edge.schedule.token_job import TokenJob

SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)  # of the model's own K
DECODE_HELD_OUT, PREFILL_HELD_OUT = 12, 8
PROMPT_TOKENS = 96  # of rows that decode
STEPS = 3  # in a row at one setting; the first is not timed
STEPS_OF_ROWS = 5  # until one of them ends
MIN_SECONDS = 1e-7  # of a shape: above 0


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """A point beside the tables.

    Attributes:
      kind: decode or prefill; size: rows or tokens; k: the mean.
      measured_s, fitted_s: seconds of it.
    """

    kind: str
    size: int
    k: float
    measured_s: float
    fitted_s: float

    @property
    def error(self) -> float:
        return abs(self.fitted_s / self.measured_s - 1)


@dataclasses.dataclass(frozen=True)
class MeasuredSteps:
    """Costs of steps and how far they are off."""

    costs: StepCosts
    held_out: tuple[HeldOut, ...]

    def errors(self) -> dict[str, float]:
        """Mean and worst relative error at the held-out points, by kind."""
        found = {}
        for kind in ("decode", "prefill"):
            each = [point.error for point in self.held_out if point.kind == kind]
            found[f"{kind}_mean_error"] = statistics.mean(each)
            found[f"{kind}_worst_error"] = max(each)
        return found

    def to_json(self) -> dict[str, Any]:
        """`step_costs` of a machine.json."""
        held_out = [dataclasses.asdict(point) for point in self.held_out]
        return {**self.costs.to_json(), **self.errors(), "held_out": held_out}


def measure_steps(
    engine: Engine,
    *,
    max_batch: int = 8,
    max_context: int = 1024,
    repeats: int = 5,
    seed: int = 0,
) -> MeasuredSteps:
    """Times steps of row slots over an engine.

    Args:
      max_batch: most rows.
      max_context: tokens of a row, at most; no longer prompts are timed.
      repeats: rounds through all settings.
      seed: of tokens and held-out points.
    Raises:
      ConfigError: a context that is too short for it.
    """
    check_count("max_batch", max_batch)
    check_count("repeats", repeats)
    context = min(max_context, engine.config.max_positions)
    slots = RowSlots(engine, max_rows=max_batch, max_context=context)
    timer = _Timer(slots, engine.config.vocab_size, repeats, seed)
    rng, own = np.random.default_rng(seed + 1), engine.config.moe.top_k
    ks = sorted({max(1, round(own * share)) for share in SHARES})
    # Decoding: all numbers of rows, and settings of mixed K among them.
    settings = {r: [(k,) * r for k in ks] for r in range(1, max_batch + 1)}
    for rows in rng.integers(1, max_batch + 1, DECODE_HELD_OUT).tolist():
        settings[rows].append(tuple(rng.integers(1, own + 1, rows).tolist()))
    decode, held_out = [], []
    for rows, seconds in timer.decode(settings).items():
        decode.append(seconds[: len(ks)])
        held_out += [
            ("decode", rows, statistics.mean(each), seen)
            for each, seen in list(zip(settings[rows], seconds, strict=True))[len(ks) :]
        ]
    # Prompts: at both ends of each shape, and in between.
    sizes, most = timer.sizes, timer.sizes[-1]
    grid = [([size], k) for size, k in itertools.product(sizes, ks)]
    others = []
    for number in range(PREFILL_HELD_OUT):
        lengths = [int(rng.integers(1, max(most, 2)))]
        if not number % 2:
            lengths = _some_together(slots.shapes, rng) or lengths
        others.append((lengths, int(rng.integers(1, own + 1))))
    whole = _whole_shapes(slots.shapes)
    together = [(lengths, own) for lengths in whole.values()]
    seconds = timer.prefill([*grid, *together, *others])
    prefill = np.reshape(seconds[: len(grid)], (len(sizes), len(ks))).tolist()
    costs = StepCosts(
        CostTable(list(settings), ks, decode),
        CostTable(sizes, ks, prefill),
        f"measured: {max_batch} rows after {timer.prompt_tokens} tokens",
        shapes=timer.shapes(),
        batches=timer.batches(),
        **timer.changes(),
    )
    del seconds[: len(grid)]
    costs = _with_whole(costs, whole, own, seconds[: len(whole)])
    points = [HeldOut(*point, costs.decode_s(*point[1:3])) for point in held_out]
    for (lengths, k), seen in zip(others, seconds[len(whole) :], strict=True):
        size, shape = sum(lengths), slots.shapes.prompt_shape(lengths)
        fitted_s = costs.prefill_s(size, k, shape)
        points.append(HeldOut("prefill", size, float(k), seen, fitted_s))
    return MeasuredSteps(costs, tuple(points))


class _Timer:
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
    ) -> dict[int, list[float]]:
        """Seconds of a step at each setting.

        Args:
          settings: number of rows -> settings: a K for each of them.
        """
        longest = STEPS * max(map(len, settings.values()))
        if longest >= self._new_tokens:
            raise ConfigError(
                f"a context of {self.prompt_tokens + self._new_tokens} tokens is too "
                f"short to time {longest} steps; take a model with a longer one"
            )
        times = {rows: [[] for _ in each] for rows, each in settings.items()}
        for _ in range(self._repeats):  # what disturbs a moment, disturbs all a little
            for rows, each in settings.items():
                self._decode(rows, each, times[rows], longest + 1)
        seconds = iter(_levelled([*itertools.chain(*times.values())]))
        return {rows: [next(seconds) for _ in each] for rows, each in times.items()}

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

    def prefill(self, settings: Sequence[tuple[Sequence[int], int]]) -> list[float]:
        """Seconds of the one chunk of prompts of these lengths, at a K.

        They join a row that runs, if there is room: its session is made larger.
        """
        times: list[list[float]] = [[] for _ in settings]
        slots, runs = self._slots, [self._row(-1, 1, self.prompt_tokens)]
        for once in range(self._repeats + 1):
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
        return _levelled(times)

    def shapes(self) -> list[list[float]]:
        """Rows, size, capacity and seconds of every shape of prompts."""
        sizes = self._slots.shapes
        return self._each(sizes.prompt_shapes(), shape_seconds)

    def batches(self) -> list[list[float]]:
        """The same of every size of a batch that decodes, of one row each."""
        sizes = self._slots.shapes
        every = itertools.product(sizes.rows, (1,), sizes.capacities)
        return self._each(set(every), batch_seconds)

    def _each(self, shapes: Collection[Shape], seconds_of) -> list[list[float]]:
        times: dict[Shape, list[float]] = {shape: [] for shape in sorted(shapes)}
        for once in range(self._repeats + 1):
            for shape, seen in times.items():
                seconds = seconds_of(self._slots, shape)
                if once:  # the first round compiles
                    seen.append(seconds)
        return [[*shape, statistics.median(seen)] for shape, seen in times.items()]

    def _admit(self, rows: Sequence[Row]) -> None:
        for row in rows:
            job = TokenJob(
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

    def _row(self, id: int, prompt: int, new: int, k: int | None = None) -> Row:
        tokens = tuple(self._rng.integers(0, self._vocab, prompt).tolist())
        return Row(id=id, prompt=tokens, max_new_tokens=new, k=k)


def _levelled(times: Sequence[Sequence[float]]) -> list[float]:
    """Medians of each, all raised by what means are above medians.

    Few steps say little of how often one is disturbed; those of all settings do.
    """
    medians = [statistics.median(seen) for seen in times]
    alike = sum(m * len(seen) for m, seen in zip(medians, times, strict=True))
    return [m * sum(map(sum, times)) / alike for m in medians]


def _whole_shapes(sizes: SlotSizes) -> dict[Shape, list[int]]:
    """Shape of several prompts -> lengths that fill three quarters of it."""
    found = {}
    for R, S, M in sizes.prompt_shapes():
        lengths = [S * 3 // 4] * R
        if R > 1 and sizes.prompt_shape(lengths) == (R, S, M):
            found[R, S, M] = lengths
    return found


def _with_whole(
    costs: StepCosts,
    whole: Mapping[Shape, Sequence[int]],
    k: int,
    seconds: Sequence[float],
) -> StepCosts:
    """Costs by which several prompts take what they do take.

    One token in a shape does not show what each row costs besides: its first token,
    and the copy of its cache.
    """
    more = {
        shape: seen - costs.prefill_s(sum(lengths), k, shape)
        for (shape, lengths), seen in zip(whole.items(), seconds, strict=True)
    }
    shapes = [
        [*shape, max(each + more.get(tuple(shape), 0.0), MIN_SECONDS)]
        for *shape, each in costs.shapes
    ]
    return dataclasses.replace(costs, shapes=shapes)


def _some_together(sizes: SlotSizes, rng: np.random.Generator) -> list[int]:
    """Lengths of as many prompts as run together; none where they never do."""
    rows = sizes.prompt_rows[-1]
    known = sorted({size for R, size, _ in sizes.prompt_shapes() if R == rows > 1})
    if not known:
        return []
    place = int(rng.integers(len(known)))
    least = known[place - 1] + 1 if place else 1
    return rng.integers(least, known[place] + 1, rows).tolist()


def shape_seconds(slots: RowSlots, shape: Shape) -> float:
    """Seconds of a chunk in a shape that holds one token, at K 1."""
    engine, (R, S, M) = slots.engine, shape
    session = slots.shapes.new_session(engine, R, M)
    tokens, valid = np.zeros((R, S), np.int32), np.zeros((R, S), bool)
    valid[0, 0] = True
    engine.begin_prompts(session, tokens.tolist())
    session.k_B = engine.put(np.ones(R, np.int32))
    begins = np.zeros(R, np.int32)
    jax.block_until_ready(session.caches)
    return _seconds(
        lambda: jax.block_until_ready(engine.run_chunk(session, tokens, valid, begins))
    )


def batch_seconds(slots: RowSlots, batch: Shape) -> float:
    """Seconds of a step of one row in a batch, at K 1.

    It is as long as the longest row of a batch of that capacity is on the mean.
    """
    engine, (B, _, M) = slots.engine, batch
    session, is_first = slots.shapes.new_session(engine, B, M), np.arange(B) == 0
    session.growth = is_first.astype(int).tolist()
    positions = np.where(is_first, min(M * 3 // 4, M - STEPS), 0).astype(np.int32)
    session.lengths, session.positions_B = positions.tolist(), engine.put(positions)
    session.k_B = engine.put(np.ones(B, np.int32))
    tokens_B, active_B = engine.put((np.zeros(B, np.int32), is_first))
    steps = [
        _seconds(
            lambda: jax.block_until_ready(engine.decode(session, tokens_B, active_B))
        )
        for _ in range(STEPS)
    ]
    return min(steps[1:])


def _seconds(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start

"""Measures what the steps of a running batch cost: by rows or tokens, and by K.

Rows have random tokens: which experts they choose matters little to the time of an
engine whose experts are resident. The tables are judged at points that they were not
made from: rows of different K, prompts of other lengths and several at a time.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_edge.core.checks import ConfigError, check_count
from moe_edge.engine.base import Engine
from moe_edge.engine.slot_rows import Row
from moe_edge.engine.slots import RowSlots
from moe_edge.hardware.step_costs import CostTable, StepCosts

SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)  # of the model's own K
DECODE_HELD_OUT, PREFILL_HELD_OUT = 12, 8
PROMPT_TOKENS = 96  # of rows that decode
STEPS = 3  # in a row at one setting; the first is not timed


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
    engine: Engine, *, max_batch: int = 8, repeats: int = 5, seed: int = 0
) -> MeasuredSteps:
    """Times steps of row slots over an engine.

    Args:
      max_batch: most rows.
      repeats: rounds through all settings; the medians count.
      seed: of tokens and held-out points.
    """
    check_count("max_batch", max_batch)
    check_count("repeats", repeats)
    timer = _Timer(engine, max_batch, repeats, np.random.default_rng(seed))
    rng, own = np.random.default_rng(seed + 1), engine.config.moe.top_k
    ks = sorted({max(1, round(own * share)) for share in SHARES})
    # Decoding: all numbers of rows, and settings of mixed K among them.
    mixed: dict[int, list[tuple[int, ...]]] = {}
    for rows in rng.integers(1, max_batch + 1, DECODE_HELD_OUT).tolist():
        mixed.setdefault(rows, []).append(tuple(rng.integers(1, own + 1, rows)))
    decode, held_out = [], []
    for rows in range(1, max_batch + 1):
        more = mixed.get(rows, [])
        seconds = timer.decode([*((k,) * rows for k in ks), *more])
        decode.append(seconds[: len(ks)])
        held_out += [
            ("decode", rows, float(np.mean(each)), seen)
            for each, seen in zip(more, seconds[len(ks) :], strict=True)
        ]
    # Prompts: at both ends of each padded size.
    sizes, most = timer.sizes, timer.sizes[-1]
    settings = [([size], k) for size, k in itertools.product(sizes, ks)]
    others = []
    for number in range(PREFILL_HELD_OUT):
        together = 1 if number % 2 else min(4, max_batch)
        lengths = rng.integers(1, max(most // together, 2), together).tolist()
        others.append((lengths, int(rng.integers(1, own + 1))))
    seconds = timer.prefill([*settings, *others])
    grid = np.reshape(seconds[: len(settings)], (len(sizes), len(ks))).tolist()
    held_out += [
        ("prefill", sum(lengths), float(k), seen)
        for (lengths, k), seen in zip(others, seconds[len(settings) :], strict=True)
    ]
    source = f"measured: {max_batch} rows after {timer.prompt_tokens} tokens"
    rows = list(range(1, max_batch + 1))
    costs = StepCosts(CostTable(rows, ks, decode), CostTable(sizes, ks, grid), source)
    tables = {"decode": costs.decode_s, "prefill": costs.prefill_s}
    points = (HeldOut(*point, tables[point[0]](*point[1:3])) for point in held_out)
    return MeasuredSteps(costs, tuple(points))


class _Timer:
    """Times steps of a running batch.

    Attributes:
      sizes: prompt tokens at which a step's shape changes: the last of one and the
        first of the next.
      prompt_tokens: of rows that decode.
    """

    def __init__(self, engine: Engine, max_batch: int, repeats: int, rng):
        self._vocab, self._repeats, self._rng = engine.config.vocab_size, repeats, rng
        context = min(1024, engine.config.max_positions)
        self._slots = RowSlots(engine, max_rows=max_batch, max_context=context)
        chunks = self._slots.shapes.chunks
        edges = {edge for size in chunks for edge in (size, size + 1)}
        self.sizes = sorted({max(chunks[0] // 2, 1), *edges} - {chunks[-1] + 1})
        self.prompt_tokens = min(PROMPT_TOKENS, context // 2)
        self._new_tokens = context - self.prompt_tokens

    def decode(self, settings: Sequence[Sequence[int]]) -> list[float]:
        """Seconds of a step at each setting: a K for each of so many rows."""
        slots, ids = self._slots, range(len(settings[0]))
        steps = STEPS * len(settings)
        if steps >= self._new_tokens:
            raise ConfigError(
                f"a context of {self.prompt_tokens + self._new_tokens} tokens is too "
                f"short to time {steps} steps; take a model with a longer one"
            )
        times: list[list[float]] = [[] for _ in settings]
        for _ in range(self._repeats):
            slots.admit([self._row(i, self.prompt_tokens, steps + 1) for i in ids])
            while slots.has_prompts:
                slots.prefill()
            for setting, seen in zip(settings, times, strict=True):
                for id, k in enumerate(setting):
                    slots.set_k(id, int(k))
                seen += [_seconds(slots.decode) for _ in range(STEPS)][1:]
            for id in ids:
                slots.release(id)
        return [statistics.median(seen) for seen in times]

    def prefill(self, settings: Sequence[tuple[Sequence[int], int]]) -> list[float]:
        """Seconds of the one chunk of prompts of these lengths, at a K."""
        times: list[list[float]] = [[] for _ in settings]
        for once in range(self._repeats + 1):
            for (lengths, k), seen in zip(settings, times, strict=True):
                rows = [self._row(i, n, 1, k) for i, n in enumerate(lengths)]
                self._slots.admit(rows)
                seconds = _seconds(self._slots.prefill)
                if once:  # the first round compiles
                    seen.append(seconds)
                for row in rows:
                    self._slots.release(row.id)
        return [statistics.median(seen) for seen in times]

    def _row(self, id: int, prompt: int, new: int, k: int | None = None) -> Row:
        tokens = tuple(self._rng.integers(0, self._vocab, prompt).tolist())
        return Row(id=id, prompt=tokens, max_new_tokens=new, k=k)


def _seconds(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start

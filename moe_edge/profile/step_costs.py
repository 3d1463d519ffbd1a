"""Measures what the steps of a running batch cost: by rows or tokens, and by K.

Rows have random tokens: which experts they choose matters little to the time of an
engine whose experts are resident. The tables are judged at points that they were not
made from: rows of different K, prompts of other lengths and several at a time.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_edge.core.checks import check_count
from moe_edge.engine.base import Engine
from moe_edge.engine.sizes import SlotSizes
from moe_edge.engine.slots import RowSlots
from moe_edge.hardware.step_costs import CostTable, StepCosts
from moe_edge.profile.step_timer import StepTimer

SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)  # of the model's own K
DECODE_HELD_OUT, PREFILL_HELD_OUT = 12, 8
MOST_DISTURBED = 3
MIN_SECONDS = 1e-7  # of a shape: above 0


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """A point beside the tables.

    Attributes:
      kind: decode or prefill; size: rows or tokens; k: the mean.
      measured_s, fitted_s: seconds of it, on the mean.
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
    timer = StepTimer(slots, engine.config.vocab_size, repeats, seed)
    rng, own = np.random.default_rng(seed + 1), engine.config.moe.top_k
    ks = sorted({max(1, round(own * share)) for share in SHARES})
    # Decoding: all numbers of rows, and settings of mixed K among them.
    settings = {r: [(k,) * r for k in ks] for r in range(1, max_batch + 1)}
    for rows in rng.integers(1, max_batch + 1, DECODE_HELD_OUT).tolist():
        settings[rows].append(tuple(rng.integers(1, own + 1, rows).tolist()))
    decoded = timer.decode(settings)
    level = _level([seen for each in decoded.values() for seen in each])
    decode = [
        [level * statistics.median(seen) for seen in each[: len(ks)]]
        for each in decoded.values()
    ]
    # Prompts: at both ends of each shape, and in between.
    sizes, most = timer.sizes, timer.sizes[-1]
    grid = [([size], k) for size, k in itertools.product(sizes, ks)]
    groups = _groups(slots.shapes)
    others = []
    for number in range(PREFILL_HELD_OUT):
        lengths = [int(rng.integers(1, max(most, 2)))]
        if not number % 2:
            lengths = _some_together(slots.shapes, rng) or lengths
        others.append((lengths, int(rng.integers(1, own + 1))))
    times = timer.prefill([*grid, *((each, own) for each in groups), *others])
    level = _level(times)
    seconds = [level * statistics.median(seen) for seen in times]
    prefill = np.reshape(seconds[: len(grid)], (len(sizes), len(ks))).tolist()
    costs = StepCosts(
        CostTable(list(settings), ks, decode),
        CostTable(sizes, ks, prefill),
        f"measured: {max_batch} rows after {timer.prompt_tokens} tokens",
        shapes=timer.shapes(),
        batches=timer.batches(),
        runs_ahead=bool(engine.may_discard),
        **timer.keys(),
        **timer.changes(),
    )
    del seconds[: len(grid)], times[: len(grid)]
    costs = _with_groups(costs, slots.shapes, groups, seconds[: len(groups)])
    points = []
    for rows, each in settings.items():
        for ks_of_rows, seen in list(zip(each, decoded[rows], strict=True))[len(ks) :]:
            k, measured_s = statistics.mean(ks_of_rows), statistics.mean(seen)
            fitted_s = costs.decode_s(rows, k)
            points.append(HeldOut("decode", rows, k, measured_s, fitted_s))
    for (lengths, k), seen in zip(others, times[len(groups) :], strict=True):
        size, shape = sum(lengths), slots.shapes.prompt_shape(lengths)
        fitted_s = costs.prefill_s(size, k, shape, len(lengths))
        measured_s = statistics.mean(seen)
        points.append(HeldOut("prefill", size, float(k), measured_s, fitted_s))
    return MeasuredSteps(costs, tuple(points))


def _level(times: Sequence[Sequence[float]]) -> float:
    """What means of settings are, over their medians.

    Few steps say little of how often one is disturbed; those of all settings do. One
    that is far off counts as MOST_DISTURBED medians.
    """
    total = alike = 0.0
    for seen in times:
        median = statistics.median(seen)
        total += sum(min(each, MOST_DISTURBED * median) for each in seen)
        alike += median * len(seen)
    return total / alike


def _groups(sizes: SlotSizes) -> list[list[int]]:
    """Lengths of prompts: as many as each shape holds, and as few as it is for.

    They fill three quarters of their rows.
    """
    found = []
    for R, S, M in sizes.prompt_shapes():
        lengths = [S * 3 // 4] * R
        if R > 1 and sizes.prompt_shape(lengths) == (R, S, M):
            found.append(lengths)
            fewer = max(rows for rows in sizes.prompt_rows if rows < R) + 1
            if fewer < R:
                found.append(lengths[:fewer])
    return found


def _with_groups(
    costs: StepCosts,
    sizes: SlotSizes,
    groups: Sequence[Sequence[int]],
    seconds: Sequence[float],
) -> StepCosts:
    """Costs by which these groups of prompts, at the model's K, take what they take.

    One token in a shape does not show all that several prompts cost.
    """
    own, shape_of = costs.prefill.ks[-1], sizes.prompt_shape
    more = {}  # by shape and prompts: beyond the cost of tokens and shape
    for lengths, seen in zip(groups, seconds, strict=True):
        fitted_s = costs.prefill_s(sum(lengths), own, shape_of(lengths))
        more[shape_of(lengths), len(lengths)] = seen - fitted_s
    each = [
        (more[shape, shape[0]] - extra) / (shape[0] - prompts)
        for (shape, prompts), extra in more.items()
        if prompts < shape[0]
    ]
    prompt_s = max(statistics.median(each), 0.0) if each else 0.0
    shapes = []
    for *shape, alone_s in costs.shapes:
        R = shape[0]
        extra = more.get((tuple(shape), R), prompt_s * (R - 1))
        shapes.append([*shape, max(alone_s + extra - prompt_s * (R - 1), MIN_SECONDS)])
    return dataclasses.replace(costs, shapes=shapes, prompt_s=prompt_s)


def _some_together(sizes: SlotSizes, rng: np.random.Generator) -> list[int]:
    """Lengths of prompts that run together; none where they never do."""
    shapes = [(R, S) for R, S, _ in sizes.prompt_shapes() if R > 1]
    if not shapes:
        return []
    most, size = shapes[int(rng.integers(len(shapes)))]
    smaller = [S for S in sizes.chunks if S < size]
    least = smaller[-1] + 1 if smaller else 1
    return rng.integers(least, size + 1, int(rng.integers(2, most + 1))).tolist()

"""Drivers over tiny engines, on a clock of their own."""

import math

import numpy as np

from moe_edge.engine.slot_rows import SlotRow
from moe_edge.engine.slots import RowSlots
from moe_edge.schedule.decisions import Recorder
from moe_edge.schedule.loop import Limits, RequestLoop
from moe_edge.schedule.request import Request
from moe_edge.serve.driver import Driver
from tests.support.running import SIZES, engine_of, numbers_of, resident, row
from tests.support.serving import policies


class TickingClock:
    """Seconds that pass when somebody looks."""

    def __init__(self, tick_s: float = 1e-3):
        self.now_s, self.tick_s = 0.0, tick_s

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


def make_loop(policy: str, name: str, limits: Limits, max_rows: int) -> RequestLoop:
    own_k = resident(name).config.moe.top_k
    (found,) = [
        each
        for each in policies(max_batch=max_rows, own_k=own_k)
        if each.name == policy
    ]
    return RequestLoop(found, limits=limits)


def make_driver(
    name: str = "gqa",
    *,
    mode: str = "resident",
    engine=None,
    policy: str = "continuous",
    max_waiting: int | None = None,
    budget_rows: int | None = None,
    clock=None,
    fail_step: int | None = None,
    **slots,
) -> Driver:
    """A driver that records its decisions.

    Args:
      engine: in place of the one of this mode.
      budget_rows: rows of full length for which there is memory.
      **slots: of `RowSlots`.
    """
    sizes = SIZES | slots
    rows = RowSlots(engine or engine_of(mode, name), **sizes)
    budget = math.inf
    if budget_rows is not None:
        budget = budget_rows * rows.row_bytes(sizes["max_context"])
    limits = Limits(max_waiting, budget, rows.together_bytes)
    loop = make_loop(policy, name, limits, sizes["max_rows"])
    clock = clock or TickingClock()
    return Driver(rows, Recorder(loop), clock, fail_step)


def asked_of(one: SlotRow, **options) -> Request:
    """What a row of `running.row` is to a driver."""
    return Request(
        **{
            "prompt": one.prompt,
            "new_tokens": max(one.max_new_tokens, 1),
            "only_scored": not one.max_new_tokens,
            "floor": one.k,
            "sampling": one.sampling,
            "top_logprobs": one.top_logprobs,
            "score_prompt": one.score_prompt,
            **options,
        }
    )


def asked(id, length: int, new: int, k: int = 3, **options) -> Request:
    """A row with a random prompt of its length, as `running.row`."""
    return asked_of(row(id, length, new, k=k), **options)


class Told:
    """What a driver told of its requests.

    Attributes:
      tokens, scores: live -> of its new tokens; ended: in order.
    """

    def __init__(self):
        self.tokens: dict[Request, list[int]] = {}
        self.scores: dict[Request, list] = {}
        self.ended: list[Request] = []
        self.errors: list[Exception] = []

    def add(self, stepped) -> None:
        if stepped is None:
            return
        for live, new, _ in stepped.tokens:
            self.tokens.setdefault(live, []).append(new.token)
            self.scores.setdefault(live, []).append(new.score)
        self.ended += stepped.ended
        if stepped.error is not None:
            self.errors.append(stepped.error)

    def numbers(self, live: Request) -> np.ndarray:
        return numbers_of(self.scores[live])


def drive(driver: Driver, told: Told | None = None, most: int = 500) -> Told:
    """Steps until nothing is open."""
    told = told or Told()
    for _ in range(most):
        if not driver.is_busy:
            return told
        told.add(driver.step())
    raise AssertionError(f"still busy after {most} steps")

"""Measuring several cases in one run: warm-up, interleaved rounds, late compilation.

A machine is slower at some times than at others. So every round measures every case
once, and cases are compared within rounds.
"""

import dataclasses
import functools
import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from moe_edge.bench.started import start_number

Name = TypeVar("Name", bound=Hashable)
Input = TypeVar("Input")
Figure = TypeVar("Figure")

ON_TIME = "no program was compiled while measuring"


@dataclasses.dataclass(frozen=True)
class Rounds(Generic[Name, Figure]):
    """What the rounds gave.

    Attributes:
      figures: of every case, one a round, in the order of the rounds.
      compiled_late: programs that were compiled while measuring; should be 0.
    """

    figures: Mapping[Name, list[Figure]]
    compiled_late: int = 0

    def __getitem__(self, name: Name) -> list[Figure]:
        return self.figures[name]

    def checks(self) -> dict[str, bool]:
        """Of a results entry."""
        return {ON_TIME: self.compiled_late == 0}


def measure_rounds(
    cases: Mapping[Name, Callable[[Input], Figure]],
    inputs: Sequence[Input],
    *,
    warm: Sequence[Input] = (),
    num_compiled: Callable[[], int] = int,
) -> Rounds[Name, Figure]:
    """Calls every case once in every round, and keeps what it returns.

    Each round begins with another case, and every second round goes backwards: no case
    always comes first, or always after the same other one.

    Args:
      cases: name -> function of a round's input.
      inputs: one a round, the same for all cases.
      warm: inputs of calls before the first round, which are not kept: compilation,
        first use of pages, caches.
      num_compiled: says how many programs are compiled so far.
    """
    for given in warm:
        for case in cases.values():
            case(given)
    before = num_compiled()
    figures: dict[Name, list[Figure]] = {name: [] for name in cases}
    for number, given in enumerate(inputs):
        for name in round_order(list(cases), number):
            figures[name].append(cases[name](given))
    return Rounds(figures, num_compiled() - before)


def round_order(names: Sequence[Name], number: int) -> list[Name]:
    """The order of the cases in round `number`: A B C, B A C, C A B, A C B, ...

    In a start of a study, which has one round as a rule, it is drawn by the start.
    """
    if (start := start_number()) is not None:
        return random.Random(f"{start} {number}").sample(names, len(names))
    first = number % len(names) if names else 0
    turned = [*names[first:], *names[:first]]
    return turned if number % 2 == 0 else [*turned[:1], *turned[:0:-1]]


def interleave(
    cases: Mapping[Name, Callable[[], Figure]], repeats: int
) -> Mapping[Name, list[Figure]]:
    """`measure_rounds` of functions that take nothing and return their own figure
    (seconds, a rate, ...), after one unmeasured call of each."""
    calls = {name: lambda _, case=case: case() for name, case in cases.items()}
    return measure_rounds(calls, range(repeats), warm=(None,)).figures


def round_ratios(ours: Sequence[float], peer: Sequence[float]) -> list[float]:
    """ours / peer of every round."""
    return [a / b for a, b in zip(ours, peer, strict=True)]


def timed(function: Callable[[], Figure]) -> tuple[Figure, float]:
    """What a call returns, and its seconds."""
    started = time.perf_counter()
    found = function()
    return found, time.perf_counter() - started


def seconds_of(function: Callable[[], Any]) -> float:
    """How long a call takes."""
    return timed(function)[1]


def interleave_seconds(
    cases: Mapping[Name, Callable[[], Any]], repeats: int
) -> Mapping[Name, list[float]]:
    """`interleave` of how long the calls take."""
    calls = {name: functools.partial(seconds_of, case) for name, case in cases.items()}
    return interleave(calls, repeats)

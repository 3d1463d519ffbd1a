"""Replays candidates in bounded time: wide with few prompts, then the best with all."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.core.progress import counter
from moe_edge.planner.candidates import Candidate, Refused, Space
from moe_edge.planner.choose import Judged, judge, ranked
from moe_edge.planner.estimate import Estimate, Subject, estimate
from moe_edge.planner.options import PlanOptions
from moe_edge.planner.quality import Quality
from moe_edge.planner.replayed import layer_slots

FEW_PROMPTS = 4
KEPT = 3  # candidates that a stage hands on
LEAST_FINALISTS = 2  # however long it takes
WIDE = 0.6  # of the seconds, for stages with few prompts
FINALISTS = 8  # that are replayed with all prompts

Parts = tuple[Quality, dict[str, Mapping[str, Any]]]  # what a candidate is made of
Subjects = Mapping[tuple[int | None, str | None], Subject]


class Found(NamedTuple):
    """Estimated candidates, the chosen one first."""

    judged: list[Judged]
    refused: list[Refused]
    replays: int
    seconds: float


class _Search:
    def __init__(self, space: Space, subjects: Subjects, asked: PlanOptions, count):
        self.space, self.subjects, self.asked = space, subjects, asked
        self.refused: list[Refused] = []
        self.replays, self._begun_s = 0, time.perf_counter()
        self._done: dict[str, Judged] = {}
        self._parts: dict[int, Parts] = {}  # by the id of what was made of them
        self._count = count

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._begun_s

    def try_all(self, near: Sequence[Parts], *dimensions: str) -> None:
        """Estimates every combination of dimensions beside each of `near`."""
        for quality, own in near:
            for chosen in self.space.all(*dimensions):
                if self.seconds > WIDE * self.asked.search_s and self._done:
                    return
                self._try(quality, own | chosen)

    def _try(self, quality: Quality, chosen) -> None:
        what = " ".join(f"{n} {v}" for d in chosen.values() for n, v in d.items())
        what = what if quality.label == "lossless" else f"{what}, {quality.label}"
        try:
            candidate = self.space.candidate(quality, **chosen)
            subject = self.subjects[candidate.k, candidate.expert_dtype]
            slots = layer_slots(candidate.options, subject.live)
            # Another name of a plan of the same slots is no other candidate.
            others = {n: v for n, v in candidate.changes.items() if n != "slot_plan"}
            key = f"{others} {quality.label} {slots}"
            if key in self._done:
                return
            found = self.estimate(candidate, FEW_PROMPTS)
        except (ConfigError, CapacityError) as error:
            self.refused.append(Refused.by(what, error))
            return
        self._done[key] = judge(candidate, found, self.asked)
        self._parts[id(self._done[key])] = quality, dict(chosen)

    def estimate(self, candidate: Candidate, prompts: int | None) -> Estimate:
        subject = self.subjects[candidate.k, candidate.expert_dtype]
        self.replays += 1
        self._count()
        return estimate(candidate, subject, prompts)

    def best(self, count: int) -> list[Parts]:
        """What the best so far are made of."""
        order = ranked([*self._done.values()], self.asked)[:count]
        return [self._parts[id(one)] for one in order]

    def finalists(self) -> list[Judged]:
        """The best, and what the user would have without a plan, with all prompts."""
        every = [*self._done.values()]
        order, found = ranked(every, self.asked)[:FINALISTS], []
        order += [one for one in every[:1] if one not in order]
        for one in order:
            least = max(
                LEAST_FINALISTS, self.asked.verify * (1 + self.asked.verify_top)
            )
            if self.seconds > self.asked.search_s and len(found) >= least:
                break
            again = self.estimate(one.candidate, None)
            found.append(judge(one.candidate, again, self.asked))
        return ranked(found, self.asked)


def search(
    space: Space, subjects: Subjects, qualities: Sequence[Quality], asked: PlanOptions
) -> Found:
    """Estimates the candidates of a space.

    Args:
      subjects: by (k, expert_dtype), calibrated.
      qualities: that the targets allow, the lossless one (or what the user fixed)
        first.
    Raises:
      CapacityError, ConfigError: no candidate can run; says why the first cannot.
    """
    with counter("candidates replayed") as count:
        run = _Search(space, subjects, asked, count)
        first = qualities[0]
        one_of_each = {name: values[0] for name, values in space.values.items()}
        run._try(first, one_of_each)
        if not run._done and len(space.values["slot_plan"]) == 1:
            raise ConfigError("; ".join(run.refused[0][1:]))
        run.try_all([(first, one_of_each)], "eviction", "slot_plan")
        if not run._done:
            refused = run.refused[0]
            raise CapacityError(f"{refused.reason}; {refused.remedy}")
        (_, chosen), *_ = run.best(1)
        run.try_all([(quality, chosen) for quality in qualities[1:]])
        near = run.best(KEPT)  # an assist is measured without a predictor
        run.try_all(near, "assist")
        run.try_all(near, "predictor")
        run.try_all(run.best(1), "device_memory")
        return Found(run.finalists(), run.refused, run.replays, run.seconds)

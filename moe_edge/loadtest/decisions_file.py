"""A file of decisions that says how its loop was made: it is replayed from that alone.

Its first line describes the loop, every other one is a decision (`schedule/decisions`).
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_edge.core.checks import MoeEdgeError, RequestError
from moe_edge.core.files import check_there, write_text
from moe_edge.core.json_reader import parse_json, text_lines
from moe_edge.core.typed import built
from moe_edge.engine.sizes import SlotSizes
from moe_edge.hardware.step_costs import StepCosts
from moe_edge.schedule.decisions import replay
from moe_edge.schedule.loop import Limits, RequestLoop
from moe_edge.schedule.request import Request
from moe_edge.serve.options import ServingOptions, make_loop


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopMade:
    """All that a loop's decisions follow from, besides its events.

    Attributes:
      options: of serving; max_context: as it was for the model.
      own_k: experts a token of the model itself.
      kv_budget_bytes: of caches of running rows; None: any number.
      costs: `step_costs` of the machine; None: none.
    """

    options: dict[str, Any]
    max_context: int
    own_k: int
    kv_budget_bytes: int | None
    costs: dict[str, Any] | None

    @classmethod
    def of(
        cls,
        options: ServingOptions,
        *,
        max_context: int,
        own_k: int,
        kv_budget_bytes: float = math.inf,
        costs: StepCosts | None = None,
    ) -> "LoopMade":
        """What `make_loop` is given.

        Raises:
          ConfigError: a scheduler without a name, by which decisions are made again.
        """
        options.check_named("a load is made again from a name")
        return cls(
            options=dataclasses.asdict(options) | {"costs": None},
            max_context=max_context,
            own_k=own_k,
            kv_budget_bytes=None if kv_budget_bytes == math.inf else kv_budget_bytes,
            costs=None if costs is None else costs.to_json(),
        )

    def sizes(self) -> SlotSizes:
        """Of the running batch."""
        return SlotSizes(**self._options().sizes(self.max_context))

    def loop(self) -> RequestLoop:
        """A fresh one."""
        options, budget = self._options(), self.kv_budget_bytes
        limits = Limits(
            max_waiting=options.max_waiting,
            kv_budget_bytes=math.inf if budget is None else budget,
            kv_together=self.sizes().together_bytes,
        )
        return make_loop(options, self.own_k, limits, self.step_costs())

    def step_costs(self) -> StepCosts | None:
        return None if self.costs is None else StepCosts.of_json(self.costs)

    def _options(self) -> ServingOptions:
        return built("decisions: options", ServingOptions, self.options)


def write_decisions(path: str | Path, made: LoopMade, lines: Sequence[str]) -> None:
    """Writes a loop and what it decided."""
    text = "\n".join([json.dumps({"loop": dataclasses.asdict(made)}), *lines])
    write_text(path, text + "\n")


def read_decisions(path: str | Path) -> tuple[LoopMade, list[str]]:
    """A loop and what it decided.

    Raises:
      RequestError: no file of decisions, or it cannot be read; FileNotFoundError.
    """
    check_there(path, "--decisions", "a load with this flag writes it")
    loop, lines = None, []
    for where, line in text_lines(path, RequestError):
        row, needed = parse_json(where, line, RequestError, strict=False), "event"
        if loop is None:
            loop, needed = row, "loop"
        else:
            lines.append(line)
        if not isinstance(row, dict) or needed not in row:
            raise RequestError(
                f"{where} is no line of decisions; load --decisions writes them"
            )
    if loop is None:
        raise RequestError(f"{path} is empty; load --decisions writes decisions")
    return built(f"{path}: loop", LoopMade, loop["loop"]), lines


def replay_decisions(
    made: LoopMade, lines: Sequence[str]
) -> tuple[list[Request], str | None]:
    """Makes decisions again.

    Returns:
      (the requests, with times of steps' ends; the first decision that
      differs, None if all are equal).
    Raises:
      RequestError: what the lines tell of cannot have happened.
    """
    loop = made.loop()
    seen = _Seen(loop.policy, limits=loop.limits)
    try:
        replay(lines, seen, Request)
    except MoeEdgeError as error:
        return seen.requests, str(error)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(f"decisions tell of no run: {error!r}") from error
    return seen.requests, None


class _Seen(RequestLoop):
    """A loop that keeps its requests, and when their tokens were there.

    Attributes:
      requests: in order of arrival.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.requests: list[Request] = []
        self._made: dict[int, int] = {}  # tokens before this step

    def arrive(self, job: Request, now_s: float) -> int | None:
        self.requests.append(job)
        return super().arrive(job, now_s)

    def begin_step(self, number: int, now_s: float):
        running = super().begin_step(number, now_s)
        for job in running:
            if job.admitted_s is None:
                job.admitted_s = now_s
            self._made[job.id] = job.made
        return running

    def end_step(self, number: int, now_s: float, *ended, **more):
        for job in self.lanes[number].running:
            if job.made > self._made[job.id]:
                job.note(now_s)
        return super().end_step(number, now_s, *ended, **more)

"""One pass over the requests of an OD-MoE run: its events, and what came of it."""

import dataclasses
import time

import numpy as np

from moe_edge.cluster.od_moe.roles import MAIN, SHADOW, name_of
from moe_edge.cluster.scheduler.asked import Asked, Failure
from moe_edge.cluster.scheduler.scheduler import NobodyLeft, Scheduler


@dataclasses.dataclass
class Pass:
    """One pass: requests with their tokens, and what every process noted."""

    asked: list[Asked]
    notes: dict[int, tuple[dict, dict]]
    failures: list[Failure]

    @property
    def served(self) -> list[Asked]:
        return [one for one in self.asked if one.done]

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Without each request's first token."""
        tokens = sum(len(one.tokens) - 1 for one in self.served)
        seconds = sum(one.times_s[-1] - one.times_s[0] for one in self.served)
        return tokens / seconds if seconds > 0 else None

    @property
    def ttft_s(self) -> float | None:
        """Mean seconds from a request's turn to its first token."""
        found, free_s = [], 0.0
        for one in sorted(self.served, key=lambda one: one.times_s[0]):
            found.append(one.times_s[0] - max(one.arrived_s, free_s))
            free_s = one.times_s[-1]
        return float(np.mean(found)) if found else None

    def facts(self, process: int) -> dict:
        """What a process noted; empty if it is lost."""
        return self.notes.get(process, ({}, {}))[0]


class Serving:
    """The events of one pass."""

    def __init__(self, scheduler: Scheduler, asked, drill, failures):
        self._scheduler, self._asked = scheduler, asked
        self._drill, self._failures = drill, failures
        self._by_id = {one.id: one for one in asked}
        self._begun_s, self._generated = time.perf_counter(), 0
        self._struck_s: float | None = None

    def run(self) -> None:
        """To the last token of the last request."""
        for one in self._asked:
            one.arrived_s = time.perf_counter()
            one.at = MAIN - 1
            arrays = {"prompt": np.array(one.prompt, np.int32)}
            fields = {"id": one.id, "max_new_tokens": one.max_new_tokens}
            self._scheduler.tell(MAIN - 1, "request", fields, arrays)
        while not all(one.ended for one in self._asked):
            event = self._scheduler.next_event(time.monotonic() + 1.0)
            if event is None:
                continue
            if event.name == "token":
                self._token(event.fields)
            elif event.name == "failed":
                self._by_id[event.fields["id"]].error = event.fields["error"]
            elif event.name == "lost":
                self._lost(event.fields["who"], event.fields["kind"])

    def _token(self, fields: dict) -> None:
        one, now_s = self._by_id[fields["id"]], time.perf_counter()
        one.tokens.append(fields["token"])
        one.times_s.append(now_s)
        one.done = fields["done"]
        self._generated += 1
        for failure in self._failures:
            if failure.resumed_s is None:
                failure.resumed_s = now_s - self._begun_s
        drill = self._drill
        if drill is not None and self._generated >= drill.tokens:
            self._drill, self._struck_s = None, now_s - self._begun_s
            names = {name_of(n + 1): str(n) for n in self._scheduler.alive}
            who = names.get(drill.who, drill.who)
            self._scheduler.strike(dataclasses.replace(drill, who=who))

    def _lost(self, who: int, kind: str) -> None:
        if not self._scheduler.lose(who):
            return
        if not set(self._scheduler.alive) - {MAIN - 1, SHADOW - 1}:
            raise NobodyLeft("all workers are lost; nothing can go on")
        if who == MAIN - 1:
            raise NobodyLeft("the main node is lost; nothing can go on")
        now_s = time.perf_counter() - self._begun_s
        kind = "dead" if kind == "dead" else "hung"
        self._failures.append(Failure(who, kind, now_s, struck_s=self._struck_s))

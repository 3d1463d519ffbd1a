"""Decisions of a request loop: written down, and made again from the same events.

A line is one call of the loop as JSON: `t_s`, `event` (the name of the method), what it
was given and what was decided. The loop is pure, so the same events give the same
decisions; a line that differs names what has changed.
"""

import json
from collections.abc import Collection, Iterable

from moe_edge.core.checks import RequestError
from moe_edge.core.json_reader import parse_json
from moe_edge.schedule.loop import RequestLoop
from moe_edge.schedule.policy import Job


class Recorder:
    """A request loop that keeps its decisions; it is driven as the loop itself.

    Attributes:
      loop: what decides.
      lines: so far.
    """

    def __init__(self, loop: RequestLoop):
        self.loop = loop
        self.lines: list[str] = []

    def __getattr__(self, name: str):
        return getattr(self.loop, name)

    def _note(self, event: str, now_s: float | None, **more) -> None:
        self.lines.append(json.dumps({"t_s": now_s, "event": event, **more}))

    def arrive(self, job: Job, now_s: float) -> int | None:
        given = {name: getattr(job, name) for name in job.GIVEN}
        lane = self.loop.arrive(job, now_s)
        self._note("arrive", now_s, job=given, lane=lane)
        return lane

    def admit(self, job: Job, number: int, now_s: float) -> bool:
        rests = self.loop.admit(job, number, now_s)
        waiting = self.loop.lanes[number].waiting
        place = waiting.index(job) if job in waiting else None
        self._note("admit", now_s, id=job.id, lane=number, place=place)
        return rests

    def cancel(self, number: int) -> Job | None:
        job = self.loop.cancel(number)
        self._note("cancel", None, id=number, found=job is not None)
        return job

    def expire(self, now_s: float) -> list[Job]:
        ended = self.loop.expire(now_s)
        if ended:
            self._note("expire", now_s, ended=[(job.id, job.state) for job in ended])
        return ended

    def begin_step(self, number: int, now_s: float):
        running = self.loop.begin_step(number, now_s)
        again_s = self.loop.lanes[number].again_s
        rows = [(job.id, job.k) for job in running]
        self._note("begin_step", now_s, lane=number, rows=rows, again_s=again_s)
        return running

    def end_step(
        self,
        number: int,
        now_s: float,
        finished: Collection[Job] = (),
        failed: Collection[Job] = (),
    ) -> list[Job]:
        running = self.loop.lanes[number].running
        progress = {job.id: [getattr(job, p) for p in job.PROGRESS] for job in running}
        following = self.loop.end_step(number, now_s, finished, failed)
        self._note(
            "end_step",
            now_s,
            lane=number,
            progress=progress,
            finished=[job.id for job in finished],
            failed=[job.id for job in failed],
            following=[job.id for job in following],
            outcomes=self.loop.outcomes,
        )
        return following


def replay(lines: Iterable[str], loop: RequestLoop, kind: type[Job] = Job) -> int:
    """Makes the decisions again in a fresh loop.

    Args:
      lines: of a recorder; loop: with the same policy and limits.
      kind: of the jobs.
    Returns:
      How many there were; all are equal.
    Raises:
      RequestError: one differs; both are named.
    """
    again, count = Recorder(loop), 0
    jobs: dict[int, Job] = {}
    for count, line in enumerate(lines, 1):
        given = parse_json(f"decision {count}", line, RequestError, strict=False)
        _call(again, given, jobs, kind)
        made = again.lines.pop() if again.lines else "nothing"
        if made != line.rstrip("\n"):
            raise RequestError(
                f"decision {count} is {made}, recorded was {line.rstrip()}: another "
                "policy, other options or other costs?"
            )
    return count


def _call(loop: Recorder, given: dict, jobs: dict[int, Job], kind: type[Job]) -> None:
    """The call that a line tells of; jobs that arrive are added."""
    event, now_s = given["event"], given["t_s"]
    if event == "arrive":
        job = jobs[given["job"]["id"]] = kind(**given["job"])
        loop.arrive(job, now_s)
    elif event == "admit":
        loop.admit(jobs[given["id"]], given["lane"], now_s)
    elif event == "cancel":
        loop.cancel(given["id"])
    elif event == "expire":
        loop.expire(now_s)
    elif event == "begin_step":
        loop.begin_step(given["lane"], now_s)
    else:
        for number, values in given["progress"].items():
            job = jobs[int(number)]
            for name, value in zip(job.PROGRESS, values, strict=True):
                setattr(job, name, value)
        ended = ([jobs[n] for n in given[name]] for name in ("finished", "failed"))
        loop.end_step(given["lane"], now_s, *ended)

"""What `SlotSteps` says of a step is what row slots compute, step by step."""

import pytest

from moe_edge.engine.slots import RowSlots
from moe_edge.schedule.continuous import Continuous
from moe_edge.schedule.continuous_one_k import ContinuousOneK
from moe_edge.schedule.loop import RequestLoop
from moe_edge.schedule.request import Request
from moe_edge.simulate.serving import SlotSteps, Step
from tests.support.running import resident, row
from tests.support.slow_cases import slow

# (step before which it comes, prompt, new tokens): alone, two at a time, a third one
# that waits for them, one of one chunk, and one of several.
REQUESTS = [(0, 9, 9), (2, 20, 3), (2, 33, 4), (3, 5, 1), (4, 40, 6), (5, 3, 2)]
GROWING = (6, 120, 20)  # out of one capacity into the next


class Watched:
    """An engine that keeps the shapes of what it runs; it runs no step ahead."""

    may_run_ahead = may_discard = False

    def __init__(self, engine):
        self._engine, self.shapes, self.batches = engine, [], []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def decode(self, session, *more, **options):
        self.batches.append((len(session.lengths), 1, session.capacity))
        return self._engine.decode(session, *more, **options)

    def run_chunk(self, session, tokens, *more):
        self.shapes.append((*tokens.shape, session.capacity))
        return self._engine.run_chunk(session, tokens, *more)


# The second one is rounded down; in the third, short prompts run together.
@pytest.mark.parametrize("prefill_chunk, context", [(16, 64), (24, 64), (128, 256)])
@pytest.mark.parametrize("is_deterministic", [*slow(False), True])
def test_steps_are_those_of_row_slots(prefill_chunk, context, is_deterministic):
    engine = Watched(resident("gqa"))
    slots = RowSlots(
        engine,
        max_rows=4,
        max_context=context,
        prefill_chunk=prefill_chunk,
        prompt_rows=2,
        deterministic=is_deterministic,
    )
    steps, loop = SlotSteps(slots.shapes), RequestLoop(Continuous(4))
    jobs, requests = {}, [*REQUESTS, GROWING] if context > 128 else REQUESTS
    for step in range(100):
        for number, (when, prompt, new) in enumerate(requests):
            if when == step:
                job = Request(number, floor=2, prompt_tokens=prompt, new_tokens=new)
                jobs[number] = job
                loop.admit(job, loop.arrive(job, step), step)
        if step == 7:
            loop.cancel(4)  # its prompt has run in part
            slots.release(4)
        running = loop.begin_step(0, step)
        if not running:
            break
        expected = steps.next(running)
        admit(running, slots)
        tokens = compare(expected, slots, engine, running)
        end_step(tokens, jobs, slots, loop, step)
    assert len(jobs) == len(requests) and not loop.open
    assert loop.outcomes["cancelled"] == 1
    assert loop.outcomes["finished"] == len(requests) - 1


# Requests as above, with floors: the highest of those that run is all rows' K.
FLOORS = (1, 3, 2, 3, 1, 3)


@pytest.mark.parametrize("policy", [Continuous(4), ContinuousOneK(4)])
def test_steps_that_could_not_begin_ahead_are_named(policy):
    slots = RowSlots(resident("gqa"), max_rows=4, max_context=256, prompt_rows=2)
    steps, loop, jobs = SlotSteps(slots.shapes), RequestLoop(policy), {}
    seen = {"ahead": 0, "new": 0, "in vain": 0, "moved": 0}
    requests = [*zip(REQUESTS, FLOORS, strict=True), (GROWING, 2), ((50, 9, 20), 1)]
    requests += [((52, 9, 9), 3)]
    for step in range(100):
        for number, ((when, prompt, new), floor) in enumerate(requests):
            if when == step:
                jobs[number] = job = Request(
                    number, floor=floor, prompt_tokens=prompt, new_tokens=new
                )
                loop.admit(job, loop.arrive(job, step), step)
        running = loop.begin_step(0, step)
        if not running:
            continue
        expected = steps.next(running)
        admit(running, slots)
        for job in running:
            slots.set_k(job.id, job.k)
        batch = slots._batch
        session, begun = batch.session, batch._begun
        tokens = [new.id for new in slots.decode()]
        if tokens:
            ks = [] if begun is None else [k for k in begun.ks if k]
            is_ahead = begun is not None and {*ks} == {slots[n].k for n in tokens}
            in_vain = begun is not None and not is_ahead
            assert not expected.is_new == (begun is not None)
            assert expected.in_vain_k == (sum(ks) / len(ks) if in_vain else None)
            # A batch that just begins was made with its prompt.
            assert expected.is_moved == (batch.session is not session)
            seen["ahead"] += is_ahead
            seen["in vain"] += in_vain
            seen["new"] += expected.is_new
            seen["moved"] += expected.is_moved
        tokens += [new.id for new in slots.prefill()]
        end_step(tokens, jobs, slots, loop, step)
    assert loop.outcomes["finished"] == len(requests)
    assert (seen.pop("in vain") > 0) == (policy.name == "continuous_one_k")
    assert min(seen.values()) > 2, seen


def admit(running, slots) -> None:
    """Those that join become rows."""
    joining = [job for job in running if job.id not in slots.ids]
    slots.admit([row(j.id, j.prompt_tokens, j.new_tokens, k=j.k) for j in joining])


def end_step(tokens, jobs, slots, loop, step: int) -> None:
    """Counts a step's tokens; rows that have all of theirs leave."""
    for number in tokens:
        jobs[number].made += 1
    ended = [jobs[number] for number in tokens if not jobs[number].left]
    for job in ended:
        slots.release(job.id)
    loop.end_step(0, step, ended)


def compare(expected: Step, slots, engine, running) -> list[int]:
    """Runs a step of the slots and holds it against the computed one; new tokens."""
    done = {job.id: slots[job.id].length for job in running}
    decoded = [new.id for new in slots.decode()]
    assert sorted(decoded) == sorted(job.id for job in expected.decode)
    batches = [] if expected.batch is None else [expected.batch]
    assert engine.batches == batches
    engine.shapes.clear()
    engine.batches.clear()
    first = [new.id for new in slots.prefill()]
    lengths = {job.id: slots[job.id].length for job in running if not job.made}
    chunks = [(n, done[n], now) for n, now in lengths.items() if now > done[n]]
    assert chunks == [(job.id, start, stop) for job, start, stop in expected.chunks]
    assert first == [chunk.job.id for chunk in expected.chunks if chunk.is_last]
    if expected.shape is None:
        assert not engine.shapes
    else:
        rows, size, capacity = expected.shape
        assert engine.shapes == [(rows, size, capacity)]
    return [*decoded, *first]

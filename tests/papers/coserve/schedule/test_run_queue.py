"""The queue in runs of one expert: the same as a plain list, with its index right."""

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.papers.coserve.schedule.run_queue import ExpertJob, RunQueue


def empty(num_experts=4, follow=None):
    counts = np.zeros((2, num_experts), int)
    return RunQueue(*counts, follow or {}), counts


def job(number, expert, added_s=1.0):
    made = ExpertJob(number, expert=expert)
    made.added_s = added_s
    return made


@pytest.mark.parametrize("arranged", [False, True])
def test_queue_is_as_a_plain_list_and_its_index_agrees(arranged):
    rng = np.random.default_rng(3)
    queue, (waiting_E, coming_E) = empty(follow={0: 3, 1: 3})
    plain, gone = [], None
    for number in range(600):
        if plain and rng.random() < 0.45:
            gone = plain.pop(int(rng.integers(len(plain))) if number % 3 else 0)
            queue.remove(gone)
        else:
            new = job(number, int(rng.integers(4)))
            place = len(plain)
            if arranged and any(one.expert == new.expert for one in plain):
                last = [n for n, one in enumerate(plain) if one.expert == new.expert]
                place = last[-1] + 1
            assert queue.behind(new.expert) == place or not arranged
            plain.insert(place, new)
            queue.insert(place, new)
        assert list(queue) == plain and len(queue) == len(plain)
        assert queue.added_s == pytest.approx(len(plain))
        experts = [one.expert for one in plain]
        assert waiting_E.tolist() == [experts.count(e) for e in range(4)]
        assert coming_E.tolist() == [0, 0, 0, experts.count(0) + experts.count(1)]
        assert set(queue.runs) == set(experts) or not arranged
        for run in queue.in_order:
            assert all(one.expert == run.expert and one.run is run for one in run.jobs)
        if plain:
            assert queue.first.jobs[0] is plain[0] is queue[0]
            assert queue[-1] is plain[-1]
            middle = len(plain) // 2
            assert queue.index(plain[middle]) == middle and plain[middle] in queue
        assert gone is None or gone not in queue


def test_run_that_is_begun_takes_in_nobody_and_ends_with_its_last():
    queue, _ = empty()
    jobs = [job(n, expert) for n, expert in enumerate((0, 1, 1, 1))]
    for one in jobs:
        queue.insert(queue.behind(one.expert), one)
    run = queue.runs[1]
    queue.begin(run)
    assert queue.begun is run and 1 not in queue.runs
    late = job(4, 1)
    assert queue.behind(1) == 4
    queue.insert(4, late)  # behind the begun run of the same expert
    assert late.run is queue.runs[1] is not run and list(queue) == [*jobs, late]
    later = job(5, 1)
    queue.insert(queue.behind(1), later)
    assert later.run is late.run
    for one in jobs[1:]:
        assert queue.begun is run
        queue.remove(one)
    assert queue.begun is None and list(queue) == [jobs[0], late, later]


def test_emptied_queue_predicts_nothing_whatever_rounding_says():
    queue, _ = empty()
    jobs = [job(n, 0, 0.1) for n in range(3)]
    for one in jobs:
        queue.insert(len(queue), one)
    for one in jobs:
        queue.remove(one)
    assert queue.added_s == 0.0 and not queue.runs
    with pytest.raises(IndexError, match="queue of 0 has no place 0"):
        queue[0]


def test_wrong_places_and_strangers_are_refused():
    queue, _ = empty()
    for n, expert in enumerate((0, 0, 1)):
        queue.insert(len(queue), job(n, expert))
    with pytest.raises(ConfigError, match="place 1 of a queue of 3 is not behind exp"):
        queue.insert(1, job(3, 0))
    with pytest.raises(ConfigError, match="behind expert 2; expected 3 or the end"):
        queue.insert(0, job(3, 2))
    with pytest.raises(ValueError, match="request 9 does not wait here"):
        queue.remove(job(9, 0))
    with pytest.raises(ConfigError, match="insert and remove"):
        queue[0] = job(3, 0)
    del queue[0]
    assert [one.id for one in queue] == [1, 2]

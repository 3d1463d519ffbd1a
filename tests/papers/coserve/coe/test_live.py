"""Experts that load and compute on this machine, on a board of tiny networks."""

import collections

import jax
import numpy as np
import pytest

from moe_edge.papers.coserve.coe.executor import Programs, bucket, buckets
from moe_edge.papers.coserve.coe.images import request_images
from moe_edge.papers.coserve.coe.store import ExpertStore
from moe_edge.papers.coserve.schedule.coe_recipes import RECIPES
from moe_edge.papers.coserve.workload.coe_graph import OK
from tests.papers.coserve.support.coe_live import (
    LOAD_S,
    MAX_BATCH,
    live_of,
    machine_of,
    served,
    write_judging_board,
)
from tests.support.compilations import compilations


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("board")


@pytest.fixture(scope="module")
def board(folder):
    return write_judging_board(folder)


def test_each_request_gets_the_same_verdict_whatever_serves_it(board, folder):
    graph, requests = board
    answers, seen = one_by_one(graph, folder, requests), 0
    cases = [(name, {"gpu": 2, "cpu": 1}, 3, {}) for name in RECIPES]
    cases += [("affinity", {"cpu": 1}, 1, {}), ("coserve", {"cpu": 3}, 8, {})]
    hurry = {"options": {"max_wait_s": 2 * LOAD_S["disk"]}}
    cases += [("affinity", {"gpu": 2, "cpu": 1}, 3, hurry)]
    there = Programs(graph, jax.devices()[0]).compiled
    for executors, experts in {(str(c[1]), c[2]): c[1:3] for c in cases}.values():
        live = live_of(folder, graph, requests, machine_of(graph, executors, experts))
        with compilations() as compiled:
            for name, *of, more in cases:
                if of != [executors, experts]:
                    continue
                run = served(live, name, **more)
                assert run.answers == answers
                assert not run.failed and set(run.latency_s) == set(range(60))
                check_work(graph, live, run)
                seen += run.switches
        assert compiled == []
        for programs in live.programs.values():
            assert programs.compiled - there <= 2 * len(buckets(MAX_BATCH))
    lengths = {len(chain) for chain in answers[1].values()}
    assert seen > 50 and len(set(answers[0].values())) > 1 and lengths == {1, 2}


def one_by_one(graph, folder, requests):
    """Verdicts and chains of requests, without queues and pools."""
    programs, store = Programs(graph, jax.devices()[0]), ExpertStore(graph, folder)
    verdicts, chains = {}, {}
    images = request_images(graph, requests, folder)
    for number, (request, image) in enumerate(zip(requests, images, strict=True)):
        expert, chains[number] = graph.rules[request.component], []
        while expert is not None:
            network = programs.network(expert)
            words = network.words(store.record(expert))
            words = jax.device_put(words, programs.device)
            outputs = programs.outputs(expert, words, [image])
            ((verdicts[number], _),) = network.judge(outputs)
            chains[number].append(expert)
            goes_on = verdicts[number] == OK
            expert = graph.follow.get(expert) if goes_on else None
    return verdicts, chains, {}


def check_work(graph, live, run):
    """Each is judged once; a group loads once; lanes do one thing at a time."""
    counted = collections.Counter(e for chain in run.chains.values() for e in chain)
    stepped = collections.Counter()
    for step in run.steps:
        stepped[step.expert] += step.requests
    assert counted == stepped
    assert max(live.loads.values()) <= 1 and live.loads.total() == run.switches
    for lane in range(len(live.watching)):
        steps = [step for step in run.steps if step.lane == lane]
        for before, after in zip(steps, steps[1:], strict=False):
            assert before.end_s <= after.begin_s
        for step in steps:
            assert step.load_s >= (LOAD_S[step.tier] if step.tier else 0)


def test_logits_are_bit_equal_at_equal_bucket_and_close_at_others(board, folder):
    graph, requests = board
    programs = Programs(graph, jax.devices()[0])
    store = ExpertStore(graph, folder)
    images = request_images(graph, requests[:4], folder)
    for expert in (0, len(graph.experts) - 1):
        words = programs.network(expert).words(store.record(expert))
        words = jax.device_put(words, programs.device)
        alone = [programs.outputs(expert, words, [image])[0] for image in images]
        four = programs.outputs(expert, words, images)
        turned = programs.outputs(expert, words, images[::-1])
        three = programs.outputs(expert, words, images[:3])
        np.testing.assert_array_equal(turned[::-1], four)
        np.testing.assert_array_equal(three, four[:3])
        scale = np.std(four)
        assert np.abs(np.stack(alone) - four).max() <= 1e-5 * scale


def test_buckets_are_the_powers_of_two_up_to_the_largest_batch():
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 8)] == [1, 2, 4, 4, 8, 8]
    assert buckets(1) == [1] and buckets(8) == [1, 2, 4, 8] == buckets(5)

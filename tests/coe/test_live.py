"""Experts that load and compute on this machine, on a board of tiny networks."""

import collections
from pathlib import Path

import jax
import numpy as np
import pytest

from moe_edge.coe.executor import Programs, bucket, buckets
from moe_edge.coe.images import request_images
from moe_edge.coe.live import Live, emulated_link
from moe_edge.coe.machine import Machine
from moe_edge.coe.profile import ArchitectureCosts
from moe_edge.coe.setup import make_setup
from moe_edge.coe.store import ExpertStore, write_experts
from moe_edge.schedule.coe_recipes import RECIPES
from moe_edge.workload.coe_graph import OK
from moe_edge.workload.coe_tasks import CoeRequest
from tests.support.coe_boards import drawn_requests, write_board
from tests.support.compilations import compilations

MAX_BATCH, LOAD_S = 4, {"disk": 0.002, "host": 0.001}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("board")
    write_board(folder)
    return folder


@pytest.fixture(scope="module")
def board(folder):
    graph = write_board(folder)
    requests = drawn_requests(graph, 60, 0.0005)
    programs, store = Programs(graph, jax.devices()[0]), ExpertStore(graph, folder)
    images = request_images(graph, requests[:4], folder)
    for expert in graph.follow:  # else fresh weights find all images damaged, or none
        network, record_B = programs.network(expert), store.record(expert)
        words = jax.device_put(network.words(record_B), programs.device)
        logits_NO = programs.outputs(expert, words, images)
        arrays = network.unpack(record_B)
        arrays["head.bias"] = arrays["head.bias"] - np.median(logits_NO, axis=0)
        write_experts(folder, {graph.experts[expert].file: network.pack(arrays)})
    return graph, requests


def machine_of(graph, executors, experts, max_batch=MAX_BATCH):
    """Pools of so many of the largest experts each."""
    of = graph.architectures
    costs = {
        name: ArchitectureCosts(1e-4, 1e-4, max_batch, 1, one.record_bytes, LOAD_S)
        for name, one in of.items()
    }
    each = experts * max(one.record_bytes for one in of.values()) + max_batch
    memory = {kind: count * each for kind, count in executors.items()}
    return Machine(dict.fromkeys(executors, costs), executors, memory)


class Watching:
    """An executor that is looked at after every batch."""

    def __init__(self, executor, pool, sizes):
        self.executor, self.pool, self.sizes = executor, pool, sizes
        self.groups: list[tuple[int, bool]] = []

    def run(self, batch, images):
        outcome = self.executor.run(batch, images)
        slots = self.executor.slots
        if outcome.judged is not None:  # of this lane nobody else changes anything
            assert set(slots.arrays) == self.pool.resident
            assert slots.num_bytes == self.sizes[list(slots.arrays)].sum()
            assert slots.num_bytes <= self.pool.budget_bytes
        self.groups.append((batch.expert, batch.tier is not None))
        return outcome


class WatchedLive(Live):
    def executors(self, setup):
        made = zip(super().executors(setup), setup.pools, strict=True)
        sizes = self._graph.bytes_E
        self.watching = [Watching(*one, sizes) for one in made]
        return self.watching


def live_of(folder, graph, requests, machine):
    store = ExpertStore(graph, folder)
    return WatchedLive(graph, store, machine, requests, folder, emulated=True)


def served(live, name, **more):
    setup = make_setup(
        *(name, live._graph, live._machine, live._graph.probability_E()), **more
    )
    return live.run(setup)


def test_each_request_gets_the_same_verdict_whatever_serves_it(board, folder):
    graph, requests = board
    answers, seen = one_by_one(graph, folder, requests), 0
    cases = [(name, {"gpu": 2, "cpu": 1}, 3) for name in RECIPES]
    cases += [("affinity", {"cpu": 1}, 1), ("coserve", {"cpu": 3}, 8)]
    there = Programs(graph, jax.devices()[0]).compiled
    for executors, experts in {(str(c[1]), c[2]): c[1:] for c in cases}.values():
        live = live_of(folder, graph, requests, machine_of(graph, executors, experts))
        with compilations() as compiled:
            for name in [c[0] for c in cases if c[1:] == (executors, experts)]:
                run = served(live, name)
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
    for watching in live.watching:
        for (before, _), (after, loaded) in zip(
            watching.groups, watching.groups[1:], strict=False
        ):
            assert not (loaded and before == after)
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


def test_lost_file_fails_its_requests_and_no_others(tmp_path):
    graph = write_board(tmp_path)
    requests = drawn_requests(graph, 40, 0.0005)
    live = live_of(tmp_path, graph, requests, machine_of(graph, {"cpu": 2}, 2))
    lost = graph.rules[requests[20].component]
    path = Path(live._store.path(lost))
    path.unlink()
    run = served(live, "affinity", start_empty=True)
    hit = {n for n, r in enumerate(requests) if graph.rules[r.component] == lost}
    assert set(run.failed) == hit and hit
    for reason in run.failed.values():
        assert reason.startswith(f"weights of expert 'classifier_{lost}': {path}")
    assert set(run.verdicts) == set(range(40)) - hit


def test_images_that_cannot_be_judged_say_why(board, tmp_path):
    graph, _ = board
    good = np.zeros((32, 32, 3), np.float32)
    found = {
        "good": good,
        "small": good[:16],
        "double": good.astype(np.float64),
        "nan": np.full_like(good, np.nan),
    }
    for name, image in found.items():
        np.save(tmp_path / f"{name}.npy", image)
    (tmp_path / "text.npy").write_text("no array")
    (tmp_path / "empty.npy").write_bytes(b"")
    names = [*found, "text", "empty", "missing"]
    requests = [CoeRequest(n, 0.0, "component_0", f"{n}.npy") for n in names]
    images = dict(zip(names, request_images(graph, requests, tmp_path), strict=True))
    np.testing.assert_array_equal(images["good"], good)
    shape = "image small.npy has shape (16, 32, 3), expected (32, 32, 3)"
    assert images["small"] == shape
    assert images["double"] == "image double.npy holds float64, expected float32"
    assert images["nan"] == "image nan.npy holds NaN or infinity, expected numbers"
    for name in ("text", "empty", "missing"):
        assert images[name].startswith(f"image {name}.npy cannot be read: ")


HEADERS = {  # and what NumPy raises for them
    "open": "(" * 50,  # TokenError
    "huge": f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**30}, 3), }}",
    "list": "{[]: 1}",  # TypeError
}


def test_image_of_any_fault_fails_alone(board, tmp_path):
    graph, _ = board
    drawn = {"seed": 3, "defect": None}
    images = [f"{name}.npy" for name in HEADERS]
    for name, header in HEADERS.items():
        size = (len(header) + 1).to_bytes(2, "little")
        content = b"\x93NUMPY\x01\x00" + size + header.encode() + b"\n"
        (tmp_path / f"{name}.npy").write_bytes(content)
    images += ["\ud800.npy", "a\0b.npy", "a\nb.npy", drawn, drawn | {"seed": -1}, drawn]
    requests = [CoeRequest(n, 0.0, "component_0", one) for n, one in enumerate(images)]
    requests.append(CoeRequest("strange", 0.0, "\ud800", drawn))
    found = request_images(graph, requests, tmp_path)
    for number in (*range(6), 7):
        assert found[number].startswith("image ") and "cannot be " in found[number]
        assert "\n" not in found[number] and found[number].isprintable()
    assert "-1" in found[7] and found[8].shape == (32, 32, 3)
    np.testing.assert_array_equal(found[6], found[8])


def test_buckets_are_the_powers_of_two_up_to_the_largest_batch():
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 8)] == [1, 2, 4, 4, 8, 8]
    assert buckets(1) == [1] and buckets(8) == [1, 2, 4, 8] == buckets(5)


def test_emulated_link_takes_as_long_as_the_costs_say():
    line = emulated_link({100: 1.0, 300: 2.0})
    assert line.seconds(100) == pytest.approx(1.0)
    assert line.seconds(300) == pytest.approx(2.0)
    assert line.seconds(200) == pytest.approx(1.5)
    level = emulated_link({100: 0.1, 163: 0.1})
    assert level.seconds(130) == pytest.approx(0.1)
    steep = emulated_link({100: 0.1, 200: 1.0})
    assert steep.seconds(200) >= 1.0

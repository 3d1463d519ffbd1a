"""What goes wrong in live runs, and how long loads take, on a board of tiny nets."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from moe_edge.core.checks import CapacityError
from moe_edge.papers.coserve.coe.engine import ExpertEngine
from moe_edge.papers.coserve.coe.images import request_images
from moe_edge.papers.coserve.coe.setup import make_setup
from moe_edge.papers.coserve.coe.store import ExpertStore
from moe_edge.papers.coserve.schedule.affinity import LATE_LOADS
from moe_edge.papers.coserve.workload.coe_tasks import CoeRequest
from tests.papers.coserve.support.coe_boards import drawn_requests, write_board
from tests.papers.coserve.support.coe_live import (
    LOAD_S,
    WatchedLive,
    live_of,
    machine_of,
    served,
    write_judging_board,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("board")


@pytest.fixture(scope="module")
def board(folder):
    return write_judging_board(folder)


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


@pytest.mark.parametrize("name", ["samba", "samba_parallel", "affinity"])
def test_file_lost_before_pools_are_filled_fails_its_requests_and_no_others(
    name, tmp_path
):
    """As between two policies of a run."""
    graph = write_board(tmp_path)
    requests = drawn_requests(graph, 60, 0.0005)
    machine = machine_of(graph, {"gpu": 1, "cpu": 1}, 2)
    live = live_of(tmp_path, graph, requests, machine)
    setup = make_setup(name, graph, machine, graph.probability_E())
    used = {graph.rules[request.component] for request in requests}
    places = [setup.start] + ([] if setup.tier is None else [set(setup.tier)])
    lost = {min(place & used) for place in places}
    for expert in lost:
        Path(live._store.path(expert)).unlink()
    run = served(live, name)
    hit = {n for n, r in enumerate(requests) if graph.rules[r.component] in lost}
    assert set(run.failed) == hit and set(run.verdicts) == set(range(60)) - hit


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


def test_emulated_loads_last_what_the_costs_say_of_each_architecture(board, folder):
    """Also where the larger record is loaded faster than the smaller one."""
    graph, requests = board
    machine, sizes = machine_of(graph, {"cpu": 1}, 2), {}
    load_s = {"board_resnet": 0.03, "board_detector": 0.002}
    costs = {
        name: dataclasses.replace(one, load_s={"disk": load_s[name], "host": 0.001})
        for name, one in machine.devices["cpu"].items()
    }
    machine = dataclasses.replace(machine, devices={"cpu": costs})
    live = live_of(folder, graph, requests[:20], machine)
    for step in served(live, "coserve", start_empty=True).steps:
        if step.tier:
            kind = graph.experts[step.expert].architecture
            assert step.load_s >= load_s[kind]
            sizes[kind] = min(sizes.get(kind, 1.0), step.load_s)
    assert sizes["board_detector"] < 0.015 and len(sizes) == 2


def test_measured_loads_come_from_files_that_the_system_was_asked_to_forget(
    board, folder, monkeypatch
):
    graph, requests = board
    machine, forgotten = machine_of(graph, {"gpu": 1, "cpu": 1}, 2), []
    monkeypatch.setattr(ExpertStore, "forget", lambda _, e: forgotten.append(e))
    for emulated in (False, True):
        given = graph, ExpertStore(graph, folder), machine, requests, folder, emulated
        run, loads = served(WatchedLive(*given), "em"), forgotten[:]
        loaded = [step.expert for step in run.steps if step.tier == "disk"]
        assert len(loaded) > len({*loaded})  # some more than once
        assert sorted(loads) == ([] if emulated else sorted(loaded))
        forgotten.clear()


def test_file_that_changes_during_a_run_fails_its_requests_and_no_others(tmp_path):
    graph = write_board(tmp_path)
    requests = drawn_requests(graph, 40, 0.0005)
    live = live_of(tmp_path, graph, requests, machine_of(graph, {"cpu": 2}, 2))
    live._store.check()
    changed = graph.rules[requests[20].component]
    path = Path(live._store.path(changed))
    path.write_bytes(path.read_bytes()[::-1])  # as many bytes
    run = served(live, "coserve", start_empty=True)
    hit = {n for n, r in enumerate(requests) if graph.rules[r.component] == changed}
    assert set(run.failed) == hit and set(run.verdicts) == set(range(40)) - hit
    said = f"weights of expert 'classifier_{changed}': {path} has changed since it was"
    assert all(reason.startswith(said) for reason in run.failed.values())


@pytest.mark.parametrize("place", ["PoolSlots.write", "Programs.outputs"])
def test_memory_that_runs_out_ends_the_run_with_what_to_do(
    place, board, folder, monkeypatch
):
    graph, requests = board
    live = live_of(folder, graph, requests, machine_of(graph, {"cpu": 1}, 2))

    def run(error):
        def fail(*_):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(f"moe_edge.papers.coserve.coe.executor.{place}", fail)
            served(live, "coserve", start_empty=True)

    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying")
    for error in (full, MemoryError()):
        with pytest.raises(
            CapacityError,
            match=r"^no memory left for expert '\w+' and a batch of \d images on .*: "
            "pools and batches take more than there is; give less --memory or fewer",
        ):
            run(error)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: other"):
        run(jax.errors.JaxRuntimeError("INTERNAL: other"))


class Passing(ExpertEngine):
    """Counts lanes that begin a group while their oldest is later than it may be, and
    those passed then."""

    bound_s, overdue, passed = 0.02, 0, 0

    def _begin(self, lane, now_s):
        queue = self.serving.loop.lanes[lane].waiting
        oldest = min(queue, key=lambda job: job.arrival_s, default=None)
        latest_s, begun = self.bound_s + LATE_LOADS * LOAD_S["disk"], queue.begun
        super()._begin(lane, now_s)
        if oldest and not begun and now_s - oldest.arrival_s > latest_s:
            self.overdue += 1
            self.passed += oldest not in self.serving.loop.lanes[lane].running


def test_overdue_request_is_next_on_real_executors_under_overload(board, folder):
    """Though nobody's wait is bounded where more comes than can be served."""
    graph, _ = board
    requests = drawn_requests(graph, 900, 0.0001)
    machine = machine_of(graph, {"gpu": 1, "cpu": 1}, 2)
    live, found = live_of(folder, graph, requests, machine), []
    for bound_s in (Passing.bound_s, None):
        options = {} if bound_s is None else {"max_wait_s": bound_s}
        setup = make_setup(
            "affinity", graph, machine, graph.probability_E(), options=options
        )
        engine = Passing(graph, setup, live.executors(setup), live.images)
        run = engine.run(requests)
        assert len(run.latency_s) == 900
        found.append((engine.overdue, engine.passed, max(run.wait_s)))
    (overdue, passed, longest_s), (_, unbounded, _) = found
    assert overdue > 3 and passed == 0 and unbounded > 0
    assert longest_s > Passing.bound_s

"""A load on a tiny engine in this process."""

import dataclasses

import pytest

from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.loadtest.in_process import Clock, engine_results, serve
from moe_edge.loadtest.offered import LoadOptions, Offered
from moe_edge.serve.options import ServingOptions
from tests.support.tiny_checkpoint import write_tiny_checkpoint

LOAD = LoadOptions(
    poisson=100.0,
    duration_s=0.3,
    prompt_tokens=12,
    output_tokens=4,
    floors="1:1,2:1",
    seed=5,
)
OPTIONS = ServingOptions(max_batch=2, max_context=64, prefill_chunk=16, prompt_rows=2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny"))


def test_all_are_served_at_their_floors_and_decisions_are_made_again(tiny):
    results = engine_results(tiny, LOAD, OPTIONS, None, dry_run=False)
    assert results.is_equal and not results.notes
    assert len(results.served) == len(results.late_s) > 10
    for one in results.served:
        assert one.state == "finished" and one.k_least == one.floor
        assert one.arrival_s <= one.admitted_s < one.first_s <= one.last_s
    assert all(late_s >= 0 for late_s in results.late_s)
    assert results.made.max_context == 64 and results.made.kv_budget_bytes > 0
    floors = {one.floor for one in results.served}
    assert floors == {1, 2}


@pytest.mark.slow
def test_caches_have_their_room_in_an_absolute_budget_of_experts(tiny):
    offload = OffloadOptions(device_memory="4MiB", slot_plan="auto")
    options = dataclasses.replace(OPTIONS, max_batch=8, max_context=128)
    results = engine_results(tiny, LOAD, options, offload, dry_run=False)
    assert {one.state for one in results.served} == {"finished"}


def test_a_dry_run_reads_no_weights(tiny, monkeypatch):
    monkeypatch.setattr("moe_edge.loadtest.in_process.load_driver", None)
    assert engine_results(tiny, LOAD, OPTIONS, None, dry_run=True) is None


class FakeClock(Clock):
    """Every look at it takes 10 ms."""

    def restart(self):
        self.now_s = 0.0

    def __call__(self):
        self.now_s += 0.01
        return self.now_s


def test_requests_come_at_their_times_also_while_a_step_runs(monkeypatch):
    """Steps of a second: whoever comes in one is handed over after it."""
    clock, slept, handed = FakeClock(), [], []

    class Steps:
        wake_s, is_busy = float("inf"), False

        def submit(self, asked, arrival_s):
            handed.append((arrival_s, clock.now_s, asked.floor, asked.prompt))
            self.is_busy = True

            return len(handed)

        def step(self):
            if not self.is_busy:
                return None
            clock.now_s, self.is_busy = clock.now_s + 1.0, False
            return Stepped()

    class Stepped:
        error = ValueError("the first one")

    def sleep(seconds):
        slept.append(seconds)
        clock.now_s += seconds

    monkeypatch.setattr("moe_edge.loadtest.in_process.time.sleep", sleep)
    requests = [Offered(0, 0.0, 1, 1, 3), Offered(1, 0.5, 1, 1), Offered(2, 9.0, 1, 1)]
    prompts = [(7,), (8,), (9,)]
    served, late_s, failure = serve(Steps(), clock, requests, prompts, 5)
    assert served == [1, 2, 3] and failure == "ValueError: the first one"
    assert [(a, floor, prompt) for a, _, floor, prompt in handed] == [
        *((0.0, 3, (7,)), (0.5, 5, (8,)), (9.0, 5, (9,))),
    ]
    assert 1.0 < handed[1][1] < 1.1 and handed[2][1] >= 9.0  # after its step; in time
    assert all(0 <= late < 0.1 for late in late_s) and 6.5 < sum(slept) < 8

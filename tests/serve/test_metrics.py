"""Counters of requests add up, and counters of experts are the engine's own."""

import itertools
import math
import random

import pytest

from moe_edge.schedule.policy import OUTCOMES, RUNNING
from moe_edge.schedule.request import Request
from moe_edge.serve.driver import Stepped
from moe_edge.serve.metrics import ENDPOINTS, Metrics, take_figures
from moe_edge.serve.options import ServingOptions, make_driver
from tests.support.prometheus import Reading
from tests.support.running import engine_of, row
from tests.support.slow_cases import slow

OPTIONS = ServingOptions(
    max_batch=2, max_context=64, prefill_chunk=16, prompt_rows=2, max_waiting=2
)
# Of interfaces.md, "Serving".
NAMES = """requests requests_running requests_waiting prompt_tokens cached_prompt_tokens
generated_tokens queue_seconds ttft_seconds tpot_seconds e2e_seconds step_seconds
pick_seconds batch_rows row_k kv_bytes kv_budget_bytes prompt_cache_bytes expert_lookups
expert_bytes compiled_programs""".split()


class Server:
    """A driver of a tiny engine whose events go to metrics, as the server's do."""

    def __init__(self, mode: str, **options):
        self.engine = engine_of(mode, "gqa")
        self.now_s = 0.0
        self.driver = make_driver(self.engine, OPTIONS, self._clock, **options)
        self.engine.reset_records()
        self.metrics, self.lives = Metrics(), {}
        self.steps, self.never_asked = [], 0

    def _clock(self) -> float:
        self.now_s += 0.001
        return self.now_s

    def submit(self, endpoint: str = ENDPOINTS[0], **asked) -> None:
        live = self.driver.submit(Request(**asked))
        self.lives[live] = endpoint
        if live.state in OUTCOMES:
            self.metrics.ended(endpoint, live)

    def cancel(self, live) -> None:
        self.driver.cancel(live)
        self.metrics.ended(self.lives[live], live)

    def step(self) -> None:
        stepped = self.driver.step()
        if stepped is None:
            return
        if stepped.k:
            self.steps.append(stepped)
            self.metrics.stepped(self.driver, stepped)
        for live in stepped.ended:
            self.metrics.ended(self.lives[live], live)

    def read(self) -> "Reading":
        return Reading(self.metrics.text(take_figures(self.driver)).decode())


def play(server: Server, seed: int, most: int = 40) -> None:
    """Requests that end in every way; what is counted adds up after every event."""
    rng = random.Random(seed)
    while len(server.lives) < most or server.driver.is_busy:
        waiting = [live for live in server.lives if live.state not in OUTCOMES]
        what = rng.random()
        if what < 0.4 and len(server.lives) < most:
            template = row("r", rng.randrange(1, 40), rng.randrange(1, 9))
            server.submit(
                rng.choice(ENDPOINTS),
                prompt=template.prompt,
                new_tokens=template.max_new_tokens,
                floor=rng.randrange(1, 4),
                deadline_s=server.now_s + 0.02 if rng.random() < 0.2 else None,
            )
        elif what < 0.45 and waiting:
            server.cancel(rng.choice(waiting))
        elif what < 0.47:
            server.metrics.refused(ENDPOINTS[0], 3)
            server.never_asked += 3
        else:
            server.step()
        now = server.read()
        still_open = now.value("requests_running") + now.value("requests_waiting")
        arrivals = len(server.lives) + server.never_asked
        assert sum(now.outcomes().values()) + still_open == arrivals
        slots = server.driver.slots
        room = now.value("kv_budget_bytes") + slots.shapes.prompt_bytes()
        assert slots.kv_bytes <= room  # of real arrays
        reserved = slots.together_bytes(
            live.kv_bytes for live in waiting if live.state == RUNNING
        )
        assert now.value("kv_bytes") == reserved


@pytest.mark.parametrize("mode", [*slow("resident"), "layered", *slow("fused")])
def test_counters_add_up_over_requests_that_end_in_every_way(mode):
    server = Server(mode, fail_step=7)
    play(server, seed=1)
    now, lives = server.read(), list(server.lives)
    for outcome, count in now.outcomes().items():
        known = sum(live.state == outcome for live in lives)
        assert count == known + (outcome == "refused") * server.never_asked
        assert count > 0, f"no request was {outcome}: another seed"
    for endpoint, outcome in itertools.product(ENDPOINTS, OUTCOMES):
        assert (endpoint, outcome) in now.samples("requests")

    begun = [live for live in lives if live.made]
    finished = [live for live in begun if live.state == "finished"]
    long = [live for live in finished if live.made > 1]
    rows = [k for stepped in server.steps for k in stepped.k]
    for name, count, total in (
        ("queue_seconds", len(begun), None),
        ("ttft_seconds", len(begun), sum(live.ttft_s for live in begun)),
        ("tpot_seconds", len(long), sum(live.tpot_s for live in long)),
        ("e2e_seconds", len(finished), None),
        ("batch_rows", len(server.steps), len(rows)),
        ("row_k", len(rows), sum(rows)),
    ):
        assert now.value(name, "_count") == count > 0, name
        if total is not None:
            assert now.value(name, "_sum") == pytest.approx(total), name
    assert now.value("generated_tokens") == sum(live.made for live in lives)
    assert now.value("prompt_tokens") == sum(len(e.prompt) for e in begun)
    assert now.value("cached_prompt_tokens") == sum(e.cached_tokens for e in begun)
    assert now.value("kv_bytes") == 0

    lookups = now.samples("expert_lookups")
    moved = server.engine.movement()
    assert sum(now.samples("expert_bytes").values()) == moved["bytes_moved"]
    hits, misses = (lookups["decode", result] for result in ("hit", "miss"))
    if mode == "resident":
        assert not any(lookups.values())
    else:
        assert hits / (hits + misses) == moved["hit_ratio"]
        assert lookups["prefill", "miss"] > 0


def test_step_seconds_are_of_halves_that_ran():
    server = Server("resident")
    server.submit(prompt=tuple(range(1, 21)), new_tokens=3, floor=3)  # two chunks
    while server.driver.is_busy:
        server.step()
    counts = server.read().samples("step_seconds", "_count")
    assert counts == {("decode",): 2, ("prefill",): 2}


def test_histogram_of_k_is_cumulative_and_exact_at_its_bounds():
    server = Server("resident")
    server.metrics.stepped(server.driver, Stepped([], [], k=(1, 3, 3, 200)))
    now = server.read()
    buckets = now.samples("row_k", "_bucket")
    assert list(buckets.values()) == sorted(buckets.values())
    assert [buckets[bound,] for bound in ("1.0", "2.0", "3.0", "128.0")] == [1, 1, 3, 3]
    assert buckets["+Inf",] == now.value("row_k", "_count") == 4
    assert now.value("row_k", "_sum") == 207


def test_names_are_those_of_the_contract_and_text_of_requests_is_not_there():
    server = Server("resident")
    server.submit(prompt=(47, 48, 49), new_tokens=2, floor=1)
    while server.driver.is_busy:
        server.step()
    now = server.read()
    assert set(now.families) == {f"moe_edge_{name}" for name in NAMES}
    labels = {
        name for f in now.families.values() for s in f.samples for name in s.labels
    }
    assert labels == {"endpoint", "outcome", "kind", "phase", "result", "cause", "le"}
    assert all(math.isfinite(s.value) for f in now.families.values() for s in f.samples)


def test_text_without_an_engine_has_what_was_counted_and_the_last_figures():
    metrics = Metrics()
    metrics.refused(ENDPOINTS[1], 2)
    now = Reading(metrics.text().decode())
    assert now.outcomes()["refused"] == 2
    assert "moe_edge_kv_bytes" not in now.families
    server = Server("resident")
    before = server.read().value("kv_budget_bytes")
    after = Reading(server.metrics.text().decode()).value("kv_budget_bytes")
    assert before == after > 0


def test_two_servers_have_metrics_of_their_own():
    first, second = Metrics(), Metrics()
    first.refused(ENDPOINTS[0], 1)
    assert Reading(second.text().decode()).outcomes()["refused"] == 0

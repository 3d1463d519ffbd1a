"""Requests through loop and slots: each gets what it gets alone, and ends once."""

import dataclasses
import json
import math
from collections import Counter

import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, RequestError
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.evaluate.likelihood import Forced
from moe_edge.evaluate.stepwise import score_forced
from moe_edge.model.sampling import Sampling
from moe_edge.schedule.decisions import replay
from moe_edge.schedule.loop import Limits
from moe_edge.schedule.policy import SCHEDULERS
from moe_edge.schedule.request import Request
from tests.support.driving import (
    TickingClock,
    Told,
    asked,
    asked_of,
    drive,
    make_driver,
    make_loop,
)
from tests.support.layered import StoreReader
from tests.support.running import MODELS, alone, numbers_of, row
from tests.support.slow_cases import slow

ROWS = [
    row("a", 9, 14, k=3),
    row("b", 20, 9, k=1),
    row("c", 33, 12, k=1),
    row("d", 5, 6, k=1),
    row("e", 16, 10, k=3),
]


@pytest.mark.parametrize(
    "name", ["gqa", pytest.param("one_head", marks=pytest.mark.slow)]
)
def test_tokens_in_company_are_those_alone(name):
    driver, told, lives = make_driver(name), Told(), []
    for one in ROWS:  # one comes every other step: all join company
        lives.append(driver.submit(asked_of(one)))
        told.add(driver.step())
        told.add(driver.step())
    drive(driver, told)
    for one, live in zip(ROWS, lives, strict=True):
        assert told.tokens[live] == alone(name, one)
        assert live.state == "finished" and live.ended_by == "length"
        assert live.made == one.max_new_tokens
        assert live.k_least == one.k
    assert Counter(told.ended) == Counter(lives)  # each once
    assert driver.slots.num_rows == 0


def test_seed_gives_the_same_tokens_in_any_company():
    rule = Sampling(temperature=1.0, seed=7)
    one = asked("a", 9, 12, k=2, sampling=rule)
    by_itself = make_driver()
    live = by_itself.submit(one)
    first = drive(by_itself).tokens[live]
    driver, told = make_driver(), Told()
    driver.submit(asked("b", 20, 9, k=3, sampling=Sampling(temperature=0.7, seed=1)))
    told.add(driver.step())
    live = driver.submit(dataclasses.replace(one))
    assert drive(driver, told).tokens[live] == first
    other = driver.submit(
        asked("a", 9, 12, k=2, sampling=Sampling(temperature=1.0, seed=8))
    )
    assert drive(driver).tokens[other] != first


@pytest.mark.parametrize("when", ["waiting", "prompt", "running"])
def test_cancelled_request_changes_no_other_and_its_slot_is_free(when):
    driver, told = make_driver(), Told()
    stays = driver.submit(asked_of(ROWS[1]))
    for _ in range(3):
        told.add(driver.step())
    goes = driver.submit(asked_of(ROWS[2]))
    for _ in range({"waiting": 0, "prompt": 1, "running": 5}[when]):
        told.add(driver.step())
    assert bool(goes.made) == (when == "running")
    driver.cancel(goes)
    driver.cancel(goes)  # a second time is nothing
    assert goes.state == "cancelled" and driver.slots.num_rows == 1
    last = driver.submit(asked_of(ROWS[3]))
    told.add(driver.step())
    assert driver.num_running == 2  # in its place at once
    drive(driver, told)
    assert told.tokens[stays] == alone("gqa", ROWS[1])
    assert told.tokens[last] == alone("gqa", ROWS[3])
    assert goes not in told.ended  # whoever cancels knows
    assert driver.loop.outcomes["cancelled"] == 1


def test_deadline_of_a_waiting_request_expires_it_and_ends_a_running_one():
    clock = TickingClock(0.0)
    driver, told = make_driver(max_rows=1, prompt_rows=1, clock=clock), Told()
    runs = driver.submit(asked_of(ROWS[0], deadline_s=5.0))
    waits = driver.submit(asked_of(ROWS[1], deadline_s=4.0))
    for _ in range(4):
        told.add(driver.step())
    assert driver.wake_s == 4.0
    clock.now_s = 4.5
    stepped = driver.step()
    assert stepped.ended == [waits]
    assert (waits.state, waits.ended_by) == ("expired", None)
    told.add(stepped)
    clock.now_s = 5.5
    stepped = driver.step()
    assert stepped.ended == [runs] and not stepped.tokens and not stepped.k
    assert (runs.state, runs.ended_by) == ("finished", "deadline")
    assert told.tokens[runs] == alone("gqa", ROWS[0])[:5]
    assert not driver.is_busy and driver.step() is None
    assert driver.wake_s == math.inf


def test_failed_step_fails_what_runs_and_nothing_else():
    driver, told = make_driver(max_rows=2, fail_step=4), Told()
    lives = [driver.submit(asked_of(one)) for one in ROWS[:3]]
    drive(driver, told)
    assert [live.state for live in lives] == ["failed", "failed", "finished"]
    assert [str(error) for error in told.errors] == ["step 4 fails, as fail_step asks"]
    assert told.tokens[lives[2]] == alone("gqa", ROWS[2])  # by fresh caches
    assert driver.loop.outcomes | {"finished": 1, "failed": 2} == driver.loop.outcomes


def test_fault_in_the_text_of_a_row_fails_that_row_alone(capfd):
    def fault(new):
        raise UnicodeError("a secret")

    driver = make_driver()
    stays = driver.submit(asked_of(ROWS[1]))
    goes = driver.submit(asked_of(ROWS[3], ends=fault))
    told = drive(driver)
    assert (stays.state, goes.state) == ("finished", "failed")
    err = capfd.readouterr().err
    assert err.startswith("UnicodeError in ") and "secret" not in err
    assert not told.errors and told.tokens[stays] == alone("gqa", ROWS[1])


def test_request_is_submitted_once_and_a_copy_of_it_is_fresh():
    driver, one = make_driver(), asked("a", 9, 3)
    assert driver.submit(one) is one
    with pytest.raises(RequestError, match="submitted once"):
        driver.submit(one)
    drive(driver)
    again = dataclasses.replace(one)
    assert (one.made, one.state, again.made, again.state) == (3, "finished", 0, "new")
    driver.submit(again)
    drive(driver)
    assert (again.made, again.state, again.id) == (3, "finished", one.id + 1)


@pytest.mark.parametrize("why", ["eos", "stop"])
def test_row_ends_where_its_hook_says(why):
    whole = alone("gqa", ROWS[0])
    last = next(i for i in range(2, 14) if whole[i] not in whole[:i])
    driver = make_driver()
    ends = asked_of(ROWS[0], ends=lambda new: why if new.token == whole[last] else None)
    live = driver.submit(ends)
    assert drive(driver).tokens[live] == whole[: last + 1]
    assert live.ended_by == why


@pytest.mark.parametrize("policy", SCHEDULERS)
def test_every_request_ends_once_within_budget_and_never_below_its_floor(policy):
    rng = np.random.default_rng(3)
    driver = make_driver(policy=policy, max_waiting=6, budget_rows=1, prompt_rows=1)
    most = driver.loop.limits.kv_budget_bytes + driver.slots.shapes.prompt_bytes()
    told, lives = Told(), []
    for number in range(24):
        length, new, k = (
            int(rng.integers(*pair)) for pair in ((3, 40), (1, 12), (1, 4))
        )
        late = driver.clock() + float(rng.exponential(0.05))
        deadline_s = late if rng.random() < 0.2 else None
        lives.append(
            driver.submit(asked(number, length, new, k, deadline_s=deadline_s))
        )
        if rng.random() < 0.2:
            driver.cancel(lives[-2 if number > 2 else -1])
        for _ in range(int(rng.integers(0, 4))):
            told.add(driver.step())
            assert driver.slots.kv_bytes <= most  # of real arrays
    drive(driver, told, most=3000)
    outcomes = Counter(live.state for live in lives)
    counted = {name: n for name, n in driver.loop.outcomes.items() if n}
    assert counted == outcomes and sum(counted.values()) == len(lives)
    assert outcomes["finished"] > 3 and outcomes["refused"]
    assert len(set(told.ended)) == len(told.ended)
    assert all(live.k_least >= live.floor for live in lives if live.made)
    assert driver.slots.num_rows == 0
    # The same decisions from the same events.
    limits = Limits(6, driver.loop.limits.kv_budget_bytes, driver.slots.together_bytes)
    again = make_loop(policy, "gqa", limits, 2)
    assert replay(driver.loop.lines, again, Request) == len(driver.loop.lines)
    events = Counter(json.loads(line)["event"] for line in driver.loop.lines)
    assert events["arrive"] == len(lives) and events["end_step"] > 20


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        *slow(("resident", "gqa"), ("resident", "one_head")),
        ("resident", "mla"),
        ("fused", "gqa"),
    ],
)
def test_prompt_cache_and_company_change_no_bit_if_deterministic(mode, name):
    def run(prompt_cache_bytes: int, company: bool):
        driver, told = (
            make_driver(
                name,
                mode=mode,
                deterministic=True,
                prompt_cache_bytes=prompt_cache_bytes,
            ),
            Told(),
        )
        first = driver.submit(asked("a", 40, 10, k=2, top_logprobs=3))
        if company:
            driver.submit(asked("b", 20, 9, k=1))
        drive(driver, told)
        prompt = first.prompt[:35] + (1, 2, 3)
        second = driver.submit(asked("c", 9, 8, k=2, prompt=prompt, top_logprobs=3))
        drive(driver, told)
        assert second.cached_tokens == (32 if prompt_cache_bytes else 0)
        assert driver.slots.cache.num_bytes <= prompt_cache_bytes
        return [told.numbers(first), told.numbers(second)]

    off, *others = run(0, False), run(10**6, False), run(10**6, True), run(0, True)
    for other in others:
        for expected, got in zip(off, other, strict=True):
            np.testing.assert_array_equal(got, expected)


def test_prompt_scores_come_with_the_first_token():
    driver = make_driver()
    live = driver.submit(asked("a", 20, 2, k=2, top_logprobs=1, score_prompt=True))
    drive(driver)
    assert len(live.prompt_scores) == 19
    assert all(score.logprob <= 0 for score in live.prompt_scores)


def test_prompt_scores_of_a_lossy_route_are_those_of_its_decoding():
    options = {"device_memory": "30%", "route": "drop"}
    options = OffloadOptions(**options, route_options={"threshold": 0.9})
    engine = make_offloaded(StoreReader(MODELS["gqa"]), options)
    driver, told = make_driver(engine=engine), Told()
    one = asked("a", 12, 3, k=3, top_logprobs=2, score_prompt=True)
    live = driver.submit(one)
    drive(driver, told)
    assert len(live.prompt_scores) == 11 and len(told.tokens[live]) == 3
    assert live.made == 3 and live.routed > 0
    scores = numbers_of(live.prompt_scores)
    lossless = make_driver()
    other = lossless.submit(dataclasses.replace(one))
    drive(lossless)
    assert np.abs(scores - numbers_of(other.prompt_scores)).max() > 1e-3
    engine.close()


@pytest.mark.parametrize(
    "mode", ["layered", pytest.param("fused", marks=pytest.mark.slow)]
)
def test_prompt_scores_of_a_lossy_route_are_those_of_evaluate(mode):
    options = OffloadOptions(device_memory="50%", mode=mode, route="substitute")
    with make_offloaded(StoreReader(MODELS["gqa"]), options) as engine:
        one = asked("a", 14, 1, k=3, top_logprobs=0, score_prompt=True)
        driver = make_driver(engine=engine)
        engine.restart()
        live = driver.submit(one)
        drive(driver)
        engine.restart()  # what is near decides what is substituted
        run = score_forced(engine, [Forced(one.prompt, 1)])
    assert live.routed and live.substituted
    got = [score.logprob for score in live.prompt_scores]
    np.testing.assert_allclose(got, run.log_probs[0], atol=1e-4)


@pytest.mark.parametrize("route", ["topk", "substitute"])
def test_scores_of_a_prompt_alone_are_those_with_new_tokens(route):
    options = OffloadOptions(device_memory="50%", route=route)
    with make_offloaded(StoreReader(MODELS["gqa"]), options) as engine:
        driver, found = make_driver(engine=engine), []
        for count in (1, 0):
            engine.restart()
            one = asked("a", 14, count, k=3, top_logprobs=0, score_prompt=True)
            live = driver.submit(one)
            drive(driver)
            assert (live.ended_by, live.made) == ("length", 1)
            found.append([score.logprob for score in live.prompt_scores])
    assert len(found[0]) == len(found[1]) == 13
    np.testing.assert_allclose(*found, atol=1e-4)


def test_arrival_may_be_before_the_call():
    driver = make_driver(clock=TickingClock(0.5))
    live = driver.submit(asked_of(ROWS[3]), arrival_s=0.1)
    stepped = driver.step()
    assert live.arrival_s == 0.1
    assert live.admitted_s == 1.0 and stepped.k == (1,)
    assert stepped.pick_s == stepped.decode_s == stepped.prefill_s == 0.5


@pytest.mark.parametrize("mode", ["layered", "fused"])
def test_shares_of_what_moved_add_up(mode):
    driver = make_driver("gqa", mode=mode)
    before = driver.slots.engine.movement()["bytes_moved"]
    lives = [driver.submit(asked_of(one)) for one in ROWS]
    driver.cancel(lives[3])
    drive(driver)
    moved = driver.slots.engine.movement()["bytes_moved"] - before
    assert sum(live.moved_bytes for live in lives) == pytest.approx(moved) and moved
    assert lives[3].moved_bytes == 0 < lives[4].moved_bytes
    assert [live.routed for live in lives] == [0] * 5  # the route is lossless


def test_shares_of_a_lossy_route_add_up():
    options = OffloadOptions(
        device_memory="30%", route="drop", route_options={"threshold": 0.9}
    )
    engine = make_offloaded(StoreReader(MODELS["gqa"]), options)
    driver = make_driver(engine=engine)
    lives = [driver.submit(asked_of(one)) for one in ROWS[:3]]
    drive(driver)
    *_, chosen, changed = engine.moved()
    assert sum(live.routed for live in lives) == pytest.approx(chosen)
    assert sum(live.substituted for live in lives) == pytest.approx(changed)
    assert 0 < changed <= chosen
    engine.close()


def test_what_no_step_could_run_is_refused_at_once():
    driver = make_driver()
    with pytest.raises(CapacityError, match="9 tokens and 60 new ones exceed max_c"):
        driver.submit(asked("a", 9, 60))
    with pytest.raises(RequestError, match="61"):
        driver.submit(asked("a", 9, 6, prompt=(1, 61)))
    with pytest.raises(RequestError, match="K must be 1..3 .* got 4"):
        driver.submit(asked("a", 9, 6, k=4))
    assert not driver.is_busy and sum(driver.loop.outcomes.values()) == 0

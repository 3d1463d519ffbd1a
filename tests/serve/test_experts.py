"""What `/experts` tells of an engine is what its routers chose and its slots hold."""

import json

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.schedule.request import Request
from moe_edge.serve.driver import Driver, Stepped
from moe_edge.serve.experts import ExpertWatch
from moe_edge.serve.options import ServingOptions, make_driver
from tests.support.running import engine_of, resident, row
from tests.support.slow_cases import slow_but

MODES = ("resident", "layered", "waves", "fused")
OPTIONS = ServingOptions(
    max_batch=2, max_context=64, prefill_chunk=16, prompt_rows=2, prompt_cache="0"
)
# Two prompts of several chunks, and one that joins later.
ROWS = [row("a", 9, 14, k=3), row("b", 33, 9, k=1), row("c", 20, 6, k=2)]


def watching(driver: Driver, **options) -> ExpertWatch:
    watch = ExpertWatch(**options)
    watch.ready(driver)
    return watch


def run(driver: Driver, watch: ExpertWatch) -> tuple[list, list[np.ndarray]]:
    """Serves ROWS; (prompt, tokens and K of each, use in each step `[L, E]`)."""
    lives = [
        driver.submit(
            Request(prompt=each.prompt, new_tokens=each.max_new_tokens, floor=each.k)
        )
        for each in ROWS
    ]
    tokens = {live: [] for live in lives}
    before, uses = used(driver, watch), []
    while driver.is_busy:
        stepped = driver.step()
        for live, new, _ in stepped.tokens:
            tokens[live].append(new.token)
        watch.stepped(driver, stepped)
        uses.append(used(driver, watch) - before)
        before = used(driver, watch)
    return [(live.prompt, tuple(tokens[live]), live.floor) for live in lives], uses


def used(driver, watch) -> np.ndarray:
    return np.array([layer["used"] for layer in watch.report(driver)["layers"]])


def choices(name: str, prompt, tokens, k: int) -> np.ndarray:
    """How often the experts are chosen for a sequence whose last token is not run."""
    engine = resident(name).at_k(k)
    layers, E = engine.config.moe_layers, engine.config.moe.num_experts
    counts_LE = np.zeros((engine.config.num_layers, E + 1), int)

    def note(layer, routing):
        np.add.at(counts_LE[layer], np.asarray(routing.ids_TK).ravel(), 1)

    for _ in engine.score([prompt + tokens[:-1]], on_routing=note):
        pass
    return counts_LE[list(layers), :E]


@pytest.mark.parametrize("mode", slow_but(["layered", "fused"], MODES))
def test_report_is_what_routers_chose_and_slots_hold(mode):
    engine = engine_of(mode, "gqa")
    driver = make_driver(engine, OPTIONS)
    driver.slots.warm_up()
    engine.reset_records()
    compiled = driver.slots.num_compiled()
    watch = watching(driver, every=1)
    assert used(driver, watch).sum() == 0
    served, uses = run(driver, watch)
    report = watch.report(driver)
    assert driver.slots.num_compiled() == compiled
    expected = sum(choices("gqa", *each) for each in served)
    np.testing.assert_array_equal(used(driver, watch), expected)
    assert report["sampled_steps"] == len(uses) == driver.num_steps
    assert json.loads(json.dumps(report)) == report

    config, moved = engine.config, engine.movement()
    assert (report["mode"], report["k"]) == (
        "layered" if mode == "waves" else mode,
        config.moe.top_k,
    )
    layers = report["layers"]
    assert [layer["layer"] for layer in layers] == list(config.moe_layers)
    hits, misses = (sum(layer[key] for layer in layers) for key in ("hits", "misses"))
    assert (
        sum(report["bytes"].values()) - report["bytes"]["wasted"]
        == (moved["bytes_moved"])
    )
    if mode == "resident":
        everyone = list(range(config.moe.num_experts))
        assert all(layer["resident"] == everyone for layer in layers)
        assert (hits, misses, layers[0]["hit_ratio"]) == (0, 0, None)
    else:
        assert hits / (hits + misses) == moved["hit_ratio"]
        assert misses > 0
        held = sum(len(layer["resident"]) for layer in layers)
        assert 0 < held <= engine.report()["slots"]
        assert all(len(each["resident"]) <= each["slots"] for each in layers)
    assert (report["prediction"] is not None) == (mode in ("layered", "waves"))


def test_resident_experts_are_those_whose_records_lie_in_slots():
    engine = engine_of("layered", "gqa")
    driver = make_driver(engine, OPTIONS)
    watch = watching(driver)
    run(driver, watch)
    engine.layer_step.drain()
    cache, store = engine.cache, engine.queue.store
    slots_SR = np.asarray(engine.queue.slots.array)
    for layer in watch.report(driver)["layers"]:
        for expert in layer["resident"]:
            slot = cache.slot_LE[layer["layer"], expert]
            record_R = store.record(layer["layer"], expert)
            np.testing.assert_array_equal(slots_SR[slot], record_R)


def test_one_step_of_so_many_is_counted():
    driver = make_driver(engine_of("resident", "gqa"), OPTIONS)
    served, each_step = run(driver, watching(driver, every=1))
    watch = watching(driver, every=3)
    again, uses = run(driver, watch)
    assert again == served
    counted = [step for step, use in enumerate(uses) if use.any()]
    assert watch.report(driver)["sampled_steps"] == len(counted)
    for step in counted:
        np.testing.assert_array_equal(uses[step], each_step[step])
    # A step that had begun before it was asked for leaves its turn to the next one.
    gaps = np.diff([0, *counted, len(uses)])
    assert counted[0] == 0 and gaps.max() <= 4 and (gaps[1:-1] >= 2).all()


def test_failed_step_is_not_counted():
    driver = make_driver(engine_of("resident", "gqa"), OPTIONS)
    watch = watching(driver, every=1)
    driver.submit(Request(prompt=(1, 2), new_tokens=4, floor=3))
    watch.stepped(driver, driver.step()._replace(error=RuntimeError("drill")))
    assert used(driver, watch).sum() == watch.report(driver)["sampled_steps"] == 0
    watch.stepped(driver, driver.step())
    assert watch.report(driver)["sampled_steps"] == 1
    assert (used(driver, watch).sum(axis=1) == 3).all()  # one token of K 3


def test_step_without_a_choice_is_not_counted():
    driver = make_driver(engine_of("resident", "gqa"), OPTIONS)
    watch = watching(driver)
    watch.stepped(driver, Stepped([], []))
    assert watch.report(driver)["sampled_steps"] == 0


def test_expert_watch_of_no_steps_is_refused():
    with pytest.raises(ConfigError, match="every must be .*0"):
        ExpertWatch(every=0)

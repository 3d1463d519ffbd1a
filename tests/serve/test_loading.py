"""Memory of caches, from options to a driver that is ready."""

import pytest

from moe_edge.convert.open import open_checkpoint
from moe_edge.core import progress
from moe_edge.core.checks import CapacityError
from moe_edge.engine.layered import LayeredEngine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.slot_programs import SlotShapes
from moe_edge.schedule.request import Request
from moe_edge.serve import loading
from moe_edge.serve.loading import cache_room, load_driver
from moe_edge.serve.options import ServingOptions, cache_bytes_of
from tests.support.driving import drive
from tests.support.live_server import checkpoint

SMALL = {"max_batch": 2, "max_context": 64, "prefill_chunk": 32, "prompt_rows": 1}


def shapes_of(options: ServingOptions) -> SlotShapes:
    config = open_checkpoint(checkpoint()).config
    return SlotShapes(config, **options.sizes(options.context(config.max_positions)))


def test_caches_have_their_room_in_an_absolute_budget():
    options = ServingOptions(**SMALL, prompt_cache="50%")
    shapes = shapes_of(options)
    one, sizes = shapes.row_bytes(64), cache_bytes_of(options, shapes)
    peak = shapes.peak_bytes(2 * one)
    assert sizes == (2 * one, one, peak + one)
    room = cache_room(options, shapes.config)
    assert room["capacity"] == 64 and 0 <= room["batch"] * one - 2 * (peak + one) < one


def test_caches_of_a_type_take_its_bytes(monkeypatch):
    class Seen(Exception):
        pass

    def load(*_, **given):
        raise Seen(given)

    monkeypatch.setattr(loading, "load_engine", load)
    offload, rows = OffloadOptions(device_memory="4MiB"), {}
    for kind in ("float32", "bfloat16"):
        serving = ServingOptions(**SMALL, kv_cache=kind)
        with pytest.raises(Seen) as seen:
            load_driver(str(checkpoint()), None, offload, serving)
        (given,) = seen.value.args
        assert given["kv_cache"] == kind
        config = open_checkpoint(checkpoint()).config.with_cache(kind)
        room = {name: given[name] for name in ("batch", "capacity")}
        assert room == cache_room(serving, config)
        rows[kind] = SlotShapes(config, **serving.sizes(64)).row_bytes(64)
    assert rows["float32"] == 2 * rows["bfloat16"]


@pytest.mark.parametrize("deterministic", [False, True])
def test_least_memory_lets_rows_run_and_less_is_refused(deterministic):
    """Rows of one shape need memory for all: with less, none would be admitted."""
    options = SMALL | {"deterministic": deterministic, "prompt_cache": "0"}
    shapes = shapes_of(ServingOptions(**options))
    one, rows = shapes.row_bytes(64), 2 if deterministic else 1
    least = shapes.peak_bytes(rows * one) + one
    given = ServingOptions(**options, kv_memory=f"{least}B")
    assert cache_bytes_of(given, shapes).running == rows * one
    given = ServingOptions(**options, kv_memory=f"{least - 1}B")
    message = f"{rows} of 64 tokens, the fewest, take {least - one}: give more"
    with pytest.raises(CapacityError, match=message):
        cache_bytes_of(given, shapes)


def test_driver_over_an_offloaded_model_is_warm(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY_S", 0.001)
    monkeypatch.setattr(LayeredEngine, "remarks", lambda self: ["by a loop"])
    serving = ServingOptions(**SMALL)
    offload = OffloadOptions(device_memory="4MiB", slot_plan="auto")
    driver = load_driver(str(checkpoint()), None, offload, serving)
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("compiling decode steps: ") for line in lines)
    assert any(line.startswith("compiling prompts: ") for line in lines)
    assert lines[-1] == "by a loop", "what the user should know"
    engine, compiled = driver.slots.engine, driver.slots.num_compiled()
    assert engine.movement()["bytes_moved"] == 0  # as if nothing had run
    asked = {"prompt": (5, 6, 7), "new_tokens": 4, "floor": 2}
    lives = [driver.submit(Request(**asked)) for _ in range(3)]
    drive(driver)
    assert [live.state for live in lives] == ["finished"] * 3
    assert driver.slots.num_compiled() == compiled
    engine.close()

"""Memory of caches, from options to a driver that is ready."""

import pytest

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CapacityError
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.session import cache_bytes
from moe_edge.engine.slot_programs import SlotShapes
from moe_edge.serve.driver import Asked
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
    config, sizes = (
        shapes_of(options).config,
        cache_bytes_of(options, shapes_of(options)),
    )
    one = cache_bytes(config, 1, 64)
    assert (sizes.running, sizes.prompts, sizes.kept) == (2 * one, one, 3 * one)
    assert cache_room(options, config) == {"batch": 6, "capacity": 64}


def test_rows_of_one_shape_need_memory_for_all():
    """With less, no request would ever be admitted."""
    options = {"deterministic": True, "prompt_cache": "0"}
    one = cache_bytes(shapes_of(ServingOptions(**SMALL)).config, 1, 64)
    for memory, fits in ((2 * one, False), (3 * one, True)):
        given = ServingOptions(**SMALL, **options, kv_memory=f"{memory}B")
        if fits:
            assert cache_bytes_of(given, shapes_of(given)).running == 2 * one
            continue
        with pytest.raises(CapacityError, match=r"the fewest rows \(2\) of 64 tokens"):
            cache_bytes_of(given, shapes_of(given))


def test_driver_over_an_offloaded_model_is_warm():
    serving = ServingOptions(**SMALL)
    offload = OffloadOptions(device_memory="4MiB", slot_plan="auto")
    driver = load_driver(str(checkpoint()), None, offload, serving)
    engine, compiled = driver.slots.engine, driver.slots.num_compiled()
    assert engine.movement()["bytes_moved"] == 0  # as if nothing had run
    asked = {"prompt": (5, 6, 7), "max_new_tokens": 4, "floor": 2}
    lives = [driver.submit(Asked(**asked)) for _ in range(3)]
    drive(driver)
    assert [live.outcome for live in lives] == ["finished"] * 3
    assert driver.slots.num_compiled() == compiled
    engine.close()

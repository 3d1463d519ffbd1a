"""From a checkpoint to a driver that is ready to serve it."""

import sys
import time
from collections.abc import Callable

from moe_edge.core.progress import counter
from moe_edge.engine.asked import Asked
from moe_edge.engine.devices import Devices
from moe_edge.engine.load import check_checkpoint, load_engine, open_run
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.refusals import refuse
from moe_edge.engine.slot_programs import SlotShapes
from moe_edge.hosts.link import Link
from moe_edge.model.config import ModelConfig
from moe_edge.serve.driver import Driver
from moe_edge.serve.options import ServingOptions, cache_bytes_of, make_driver


def load_driver(
    checkpoint: str,
    k: int | None,
    offload: OffloadOptions | None,
    serving: ServingOptions,
    devices: Devices = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    fail_step: int | None = None,
    link: Link | None = None,
) -> Driver:
    """A driver whose programs are compiled; from here on nothing is.

    Prints what the user should know of the engine (`Engine.remarks`).

    Args:
      devices: as of `load_engine`.
      link: of a process among several. Those that follow process 0 compile when it
        says so.
    Raises: as `load_engine` and `make_driver`.
    """
    room = {"activations": serving.activations, "kv_cache": serving.kv_cache}
    room["weights"] = serving.weights
    if offload is not None:
        config = open_run(checkpoint, k, kv_cache=serving.kv_cache).config
        room |= cache_room(serving, config)
    given = {"with_tokenizer": False, "offload": offload, "k": k, "devices": devices}
    loaded = load_engine(checkpoint, **given, **room)
    try:
        driver = make_driver(loaded.engine, serving, clock, fail_step, link)
        if link is None or not link.index:
            with counter("compiling programs"):
                driver.slots.warm_up()
        for remark in loaded.engine.remarks():
            print(remark, file=sys.stderr)
    except BaseException:
        loaded.engine.close()
        raise
    return driver


def check_room(
    checkpoint: str,
    k: int | None,
    offload: OffloadOptions | None,
    serving: ServingOptions,
    config: ModelConfig,
    devices: int | str | None = None,
) -> None:
    """Refuses what `load_driver` would refuse, without reading weights: a budget, the
    memory of caches, policies that running batches do not take."""
    room = cache_room(serving, config)
    if offload is not None:
        refuse(Asked.of(offload, has_rows=True, deterministic=serving.deterministic))
        given = {"with_tokenizer": False, "offload": offload, "k": k}
        given |= {"devices": devices, "kv_cache": serving.kv_cache}
        check_checkpoint(checkpoint, **given, **room)


def cache_room(options: ServingOptions, config: ModelConfig) -> dict[str, int]:
    """Room for all caches in an absolute budget, as `make_offloaded` takes it."""
    context = options.context(config.max_positions)
    shapes = SlotShapes(config, **options.sizes(context))
    one, sizes = shapes.row_bytes(context), cache_bytes_of(options, shapes)
    running = shapes.peak_bytes(shapes.max_rows * one)
    total = running + sizes.prompts + sizes.kept
    return {"batch": -(-total // one), "capacity": context}

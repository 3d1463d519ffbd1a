"""Builds a layered engine: slots, a queue and a link under one `LayerStep`."""

from collections.abc import Sequence

import jax

from moe_edge.core.events import Recorder
from moe_edge.engine.backends import HostBackend
from moe_edge.engine.companion import Companion
from moe_edge.engine.inline import stay_awake
from moe_edge.engine.layer_programs import LayerPrograms
from moe_edge.engine.layered import LayeredEngine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.weights import Weights
from moe_edge.offload.carried_queue import CarriedQueue
from moe_edge.offload.direct_queue import DirectQueue
from moe_edge.offload.home_queues import HomeQueues
from moe_edge.offload.home_slots import HomeSlots
from moe_edge.offload.homes import Homes
from moe_edge.offload.indexed_slots import IndexedSlots
from moe_edge.offload.layer_step import LayerStep
from moe_edge.offload.link import TransferLink
from moe_edge.offload.slot_cache import SlotCache
from moe_edge.offload.slots import DonatedSlots, Slots, make_slots
from moe_edge.offload.store import HostStore
from moe_edge.offload.transfer_queue import TransferQueue
from moe_edge.predict.base import Predictor
from moe_edge.route.base import Route
from moe_edge.workload.traces import TraceRecorder


def make_queue(
    store: HostStore,
    slots: Slots,
    link: TransferLink,
    recorder,
    options: OffloadOptions,
    timed: bool = False,
) -> TransferQueue:
    """The queue for where blocks come from and go to.

    A thread waits for a disk or copies to another device (and from pinned memory
    anywhere); from memory to memory it would only take a core from the programs.

    Args:
      timed: whether somebody reads how long transfers took.
    """
    given = store, slots, link, recorder
    if options.asynchronous and slots.safe_in_thread and store.memory == "host":
        return CarriedQueue(*given)
    is_direct = options.layer_io == "direct" and not slots.safe_in_thread
    if options.asynchronous and is_direct:
        return DirectQueue(*given, timed=timed)
    return TransferQueue(*given, options.asynchronous)


def make_home_queues(
    store: HostStore,
    homes: Homes,
    devices: Sequence[jax.Device],
    recorder,
    options: OffloadOptions,
    timed: bool = False,
) -> HomeQueues:
    """Slots, a queue and a link for every home, as one queue."""
    shape = store.record_size, store.dtype
    parts = [
        make_slots(count, *shape, device=device)
        for count, device in zip(homes.slots_N, devices, strict=True)
    ]
    slots, queues = HomeSlots(parts, devices), []
    try:
        for home in range(len(homes)):
            given = options.link(), recorder, options, timed
            queues.append(make_queue(store, slots.part(home), *given))
    except BaseException:
        for queue in queues:
            queue.close()
        raise
    return HomeQueues(queues, slots, homes.home_S)


def make_layered(
    options: OffloadOptions,
    weights: Weights,
    store: HostStore,
    cache: SlotCache,
    *,
    predictor: Predictor,
    route: Route,
    recorder: Recorder | None,
    trace: TraceRecorder | None,
    trace_scores: bool,
    programs: LayerPrograms | None,
    shadow: Companion | None,
    devices: Sequence[jax.Device],
) -> LayeredEngine:
    """The engine, from what `offloaded.assemble` has planned.

    A queue's thread may start here, and ends if the engine is refused.
    """
    config, homes, spec = weights.config, cache.homes, cache.spec
    stay_awake()
    in_words = options.layer_io != "arrays"
    link, backends = options.link(), []
    if (assist := options.make_assist()) is not None:
        given = assist, options.assist_expert_s
        backend = HostBackend(config, store, link, *given)
        backend.links = 1 if homes is None else len(homes)
        backends.append(backend)
    is_recorded = recorder is not None and recorder.enabled
    timed = is_recorded or trace is not None or bool(backends)
    if homes is None:
        kind = IndexedSlots if in_words else DonatedSlots
        shape = spec.num_slots, store.record_size, store.dtype
        slots = make_slots(*shape, elsewhere=kind)
        queue = make_queue(store, slots, link, recorder, options, timed)
    else:
        given = recorder, options, timed
        queue = make_home_queues(store, homes, devices[: len(homes)], *given)
    try:
        layer_step = LayerStep(
            cache,
            queue,
            predictor=predictor,
            horizon=options.horizon,
            prefetch_limit=options.prefetch_limit,
            recorder=recorder,
        )
        return LayeredEngine(
            weights,
            layer_step,
            route=route,
            backends=backends,
            trace=trace,
            trace_scores=trace_scores,
            programs=programs,
            shadow=shadow,
            in_words=in_words,
        )
    except BaseException:
        queue.close()
        raise

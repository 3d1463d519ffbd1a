"""Builds a layered engine: slots, a queue and links under one `LayerStep`."""

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
from moe_edge.kernels import native
from moe_edge.offload.direct_carrier import DirectCarrier
from moe_edge.offload.home_slots import HomeSlots
from moe_edge.offload.homes import Homes
from moe_edge.offload.indexed_slots import IndexedSlots
from moe_edge.offload.layer_step import LayerStep
from moe_edge.offload.link import TransferLink
from moe_edge.offload.real_carrier import CallerCarrier, RealCarrier
from moe_edge.offload.slot_cache import SlotCache
from moe_edge.offload.slots import DonatedSlots, Slots, make_slots
from moe_edge.offload.store import HostStore
from moe_edge.offload.thread_carrier import ThreadCarrier
from moe_edge.offload.transfer_queue import TransferQueue
from moe_edge.predict.base import Predictor
from moe_edge.route.base import Route
from moe_edge.workload.traces import TraceRecorder


def make_carrier(
    store: HostStore,
    slots: Slots,
    link: TransferLink,
    recorder,
    options: OffloadOptions,
    timed: bool = False,
) -> RealCarrier:
    """Who carries, by where blocks come from and go to.

    A thread waits for a disk or copies to another device (and from pinned memory
    anywhere); from memory to memory it would only take a core from the programs.

    Args:
      timed: whether somebody reads how long transfers took.
    """
    given = store, slots, link, recorder
    if not options.asynchronous:
        return CallerCarrier(*given, serial=True)
    if slots.safe_in_thread and store.memory == "host":
        return CallerCarrier(*given, copy=native.copy)
    if options.layer_io == "direct" and not slots.safe_in_thread:
        return DirectCarrier(*given, timed=timed)
    return ThreadCarrier(*given)


def make_home_queue(
    store: HostStore,
    homes: Homes,
    devices: Sequence[jax.Device],
    recorder,
    options: OffloadOptions,
    timed: bool = False,
) -> TransferQueue:
    """Slots, a carrier and a link for every home, under one queue."""
    shape = store.record_size, store.dtype
    parts = [
        make_slots(count, *shape, device=device)
        for count, device in zip(homes.slots_N, devices, strict=True)
    ]
    slots, carriers = HomeSlots(parts, devices), []
    try:
        for home in range(len(homes)):
            given = options.link(), recorder, options, timed
            carriers.append(make_carrier(store, slots.part(home), *given))
    except BaseException:
        for carrier in carriers:
            carrier.close()
        raise
    return TransferQueue(carriers, slots, homes.home_S)


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
        carrier = make_carrier(store, slots, link, recorder, options, timed)
        queue = TransferQueue([carrier])
    else:
        given = recorder, options, timed
        queue = make_home_queue(store, homes, devices[: len(homes)], *given)
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

"""Builds an offloaded engine: slots from the budget, policies and link by name."""

from collections.abc import Sequence

import jax

from moe_edge.core.checks import ConfigError
from moe_edge.core.context import Context
from moe_edge.core.events import Recorder
from moe_edge.engine.companion import Companion
from moe_edge.engine.device_memory import device_memory_bytes
from moe_edge.engine.device_needs import DeviceNeeds, device_needs
from moe_edge.engine.fused import FusedEngine
from moe_edge.engine.fused_zero_copy import check_zero_copy
from moe_edge.engine.home_plan import plan_homes
from moe_edge.engine.layer_programs import LayerPrograms
from moe_edge.engine.layered import LayeredEngine
from moe_edge.engine.make_layered import make_layered
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.refusals import Asked, refuse
from moe_edge.engine.run_context import context_of
from moe_edge.engine.sizes import DEFAULT_CONTEXT
from moe_edge.engine.traceable import check_traceable
from moe_edge.engine.weights import Weights, load_weights, weight_shapes
from moe_edge.kernels import assist, prefetch
from moe_edge.model.config import ModelConfig
from moe_edge.offload.budget import parse_budget, slots_for
from moe_edge.offload.evict_base import EVICTIONS, CacheSpec
from moe_edge.offload.homes import Homes
from moe_edge.offload.pinned import check_limit, pinned_gib
from moe_edge.offload.slot_cache import SlotCache
from moe_edge.offload.slot_plan import (
    least_slots,
    plan_of,
    plan_slots,
)
from moe_edge.offload.store import HostStore, device_dtype, widened
from moe_edge.predict.base import PREDICTORS, Predictor, check_look_ahead
from moe_edge.route.base import get_route
from moe_edge.workload.traces import TraceRecorder

# Options that no other mode has.
OF_FUSED = "zero_copy", "prefetch_in_fused", "overlap_in_fused", "assist_in_fused"


def plan_cache(
    options: OffloadOptions,
    config: ModelConfig,
    context: Context,
    block_bytes: int,
    needs: DeviceNeeds,
    devices: Sequence[jax.Device] = (),
) -> tuple[CacheSpec, Homes | None]:
    """Slots that the budget buys next to what else is needed, shared by the plan; and
    where experts live, on several devices."""
    experts, layers = config.moe.num_experts, config.moe_layers
    if len(devices) > 1:
        there = list(map(device_memory_bytes, devices[:experts]))
        return plan_homes(options, config, context, block_bytes, needs, there)
    total = slots_for(
        parse_budget(options.device_memory),
        block_bytes,
        len(layers) * experts,
        needs.other_bytes,
        machine_bytes=device_memory_bytes(),
        least_slots=needs.least_slots,
        others=str(needs),
    )
    name, L = options.slot_plan, config.num_layers
    given = context.fill(plan_of(name), options.slot_plan_options)
    layer_S = plan_slots(name, total, L, experts, layers, **given)
    return CacheSpec(config.num_layers, experts, config.moe.top_k, layer_S), None


def make_predictor(options: OffloadOptions, context: Context) -> Predictor:
    """The predictor, with what it takes from the run."""
    given = options.predictor, options.predictor_options
    predictor = PREDICTORS.make(*given, context)
    check_look_ahead(predictor, options.horizon)
    return predictor


def check_fits_model(
    reader, options: OffloadOptions, devices: int = 1, recorded: bool = False
) -> None:
    """What `check_offload` refuses without opening the device.

    Args:
      devices: that hold experts; recorded: whether a trace or events are wanted.
    Raises: as `make_offloaded`; of budgets only shares are judged.
    """
    config = reader.config
    asked = {"devices": devices, "recorded": recorded}
    refuse(Asked.of(options, model=config, **asked))
    if options.horizon > config.num_layers:
        raise ConfigError(
            f"horizon {options.horizon} exceeds the model's {config.num_layers} layers"
        )
    budget = parse_budget(options.device_memory)
    if budget.share is not None:
        experts, layers = config.moe.num_experts, len(config.moe_layers)
        given = options.slot_plan, experts, layers, options.slot_plan_options
        slots_for(
            budget,
            reader.layout.num_bytes(widened(reader.dtype)),
            layers * experts,
            least_slots=least_slots(*given),
        )


def check_offload(
    reader,
    options: OffloadOptions,
    batch: int = 1,
    capacity: int | None = DEFAULT_CONTEXT,
    recorded: bool = False,
    devices: Sequence[jax.Device] = (),
) -> Context:
    """What `make_offloaded` would refuse, judged without reading weights.

    Args:
      batch, capacity, devices: as of `assemble`.
      recorded: whether a trace or events are wanted.
    Returns:
      what the run can give to policies: a profile trace is read here.
    Raises: as `make_offloaded`.
    """
    check_fits_model(reader, options, len(devices), recorded)
    config = reader.config
    dtype, context = device_dtype(reader.dtype), context_of(options, config)
    records = config.moe.num_experts, reader.layout.size
    needs = device_needs(
        options,
        weight_shapes(reader),
        jax.ShapeDtypeStruct(records, dtype),
        batch,
        capacity,
    )
    block_bytes = reader.layout.num_bytes(dtype)
    plan_cache(options, config, context, block_bytes, needs, devices)
    backend = jax.default_backend()
    mode = options.choose_mode(backend, recorded or len(devices) > 1)
    check_limit(pinned_gib(reader, options, mode), backend)
    for name in OF_FUSED:
        if getattr(options, name) and mode != "fused":
            raise ConfigError(
                f"{name} is True and mode {options.mode} is {mode} here; it is of "
                "mode fused: use that, or leave it out"
            )
    if options.zero_copy:
        check_zero_copy()
    if options.prefetch_in_fused or options.overlap_in_fused:
        prefetch.open_calls()
    if options.assist_in_fused:
        assist.open_calls()
    return context


def make_offloaded(
    reader,
    options: OffloadOptions,
    *,
    batch: int = 1,
    capacity: int | None = DEFAULT_CONTEXT,
    check_finite: bool = False,
    recorder: Recorder | None = None,
    with_trace: bool = False,
    devices: Sequence[jax.Device] = (),
    **assembly,
) -> LayeredEngine | FusedEngine:
    """Loads a checkpoint whose experts stay on the host; `assembly` is of `assemble`.

    Raises:
      CapacityError: a budget of fewer slots than the minimum, or above the machine.
      ConfigError: options that do not fit the model.
    """
    given = {"batch": batch, "capacity": capacity, "devices": devices}
    context = check_offload(
        reader, options, **given, recorded=is_recorded(recorder, with_trace)
    )
    weights = load_weights(reader, check_finite=check_finite, with_experts=False)
    store = HostStore(reader, options.memory)
    given |= {"recorder": recorder, "with_trace": with_trace}
    return assemble(options, weights, store, context=context, **given, **assembly)


def is_recorded(recorder: Recorder | None, with_trace: bool) -> bool:
    """Whether a trace or events are wanted."""
    return with_trace or (recorder is not None and recorder.enabled)


def assemble(
    options: OffloadOptions,
    weights: Weights,
    store: HostStore,
    *,
    context: Context | None = None,
    batch: int = 1,
    capacity: int | None = DEFAULT_CONTEXT,
    recorder: Recorder | None = None,
    with_trace: bool = False,
    trace_scores: bool = True,
    programs: LayerPrograms | None = None,
    shadow: Companion | None = None,
    hosts: Sequence[jax.Array | None] | None = None,
    devices: Sequence[jax.Device] = (),
) -> LayeredEngine | FusedEngine:
    """An offloaded engine over weights and a store, which engines may share.

    The one place where cache, queue, policies and backends become an engine. A queue's
    thread may start here, and ends if the engine is refused.

    Args:
      weights: all but the experts.
      context: of `check_offload`; None: made here.
      batch, capacity: sequences and tokens for whose KV cache an absolute budget
        leaves room, see `device_needs`.
      recorder: of events.
      with_trace: keep every lookup in `engine.trace`.
      trace_scores: with the scores of all experts, which costs a read a layer.
      programs: of another layered engine of this model.
      shadow: of this model, for a predictor that needs one; None: made here.
      hosts: records of mode fused, see `FusedEngine`; None: pinned here.
      devices: several: homes of the experts (`engine/homes.py`), the first runs all
        else. Else JAX's default one runs everything.
    Raises: as `make_offloaded`.
    """
    config = weights.config
    records = jax.ShapeDtypeStruct((store.num_experts, store.record_size), store.dtype)
    needs = device_needs(options, weights, records, batch, capacity)
    context = context or context_of(options, config)
    context = context.also(dense_layers=lambda: weights.layers)
    recorded = is_recorded(recorder, with_trace)
    asked = {"devices": len(devices), "recorded": recorded}
    refuse(Asked.of(options, model=config, **asked))
    given = store.block_bytes, needs, devices
    spec, homes = plan_cache(options, config, context, *given)
    predictor = make_predictor(options, context)
    if "shadow" in predictor.needs and shadow is None:
        shadow = predictor.companion(weights, store)
    given = options.eviction, options.eviction_options
    policy = EVICTIONS.make(*given, context)
    route = get_route(options.route, **options.route_options)
    layered = recorded or homes is not None
    if options.choose_mode(jax.default_backend(), layered) == "fused":
        check_traceable(config, spec, policy, route)
        hosts = hosts or store.pin_layers(config.num_layers)
        engine = FusedEngine(
            *(weights, hosts, spec, policy),
            route=route,
            zero_copy=options.zero_copy,
            in_turns=options.overlap_in_fused,
            predictor=predictor if options.prefetch_in_fused else None,
            prefetch_limit=options.prefetch_limit,
            assist=options.make_assist() if options.assist_in_fused else None,
            assist_deferred=options.assist_deferred,
        )
    else:
        engine = make_layered(
            options,
            weights,
            store,
            SlotCache(spec, policy, homes),
            predictor=predictor,
            route=route,
            recorder=recorder,
            trace=TraceRecorder(spec.num_experts, spec.top_k) if with_trace else None,
            trace_scores=trace_scores,
            programs=programs,
            shadow=shadow,
            devices=devices,
        )
    if parse_budget(options.device_memory).bytes is not None:
        engine.kv_limit_bytes = needs.cache
    return engine

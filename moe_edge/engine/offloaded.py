"""Builds an offloaded engine: slots from the budget, policies and link by name."""

import dataclasses
import os
from typing import Any

import jax
import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.core.events import Recorder
from moe_edge.engine.assisted import Assist
from moe_edge.engine.fused import FusedEngine, pin_records
from moe_edge.engine.layered import LayeredEngine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.session import cache_bytes
from moe_edge.engine.weights import Weights, load_weights
from moe_edge.model.config import ModelConfig
from moe_edge.offload.manager import OffloadManager
from moe_edge.offload.policy import CacheSpec, get_policy
from moe_edge.offload.slot_cache import SlotCache
from moe_edge.offload.slot_plan import (
    parse_budget,
    plan_slots,
    slots_for,
    static_hit_curves,
)
from moe_edge.offload.slots import DonatedSlots, make_slots
from moe_edge.offload.store import HostStore, device_dtype
from moe_edge.offload.transfer_queue import TransferQueue
from moe_edge.predict.registry import get_predictor
from moe_edge.predict.stale_gate import GatePredictor
from moe_edge.route.policy import get_route
from moe_edge.workload.trace_reader import read_trace
from moe_edge.workload.traces import DECODE, TraceRecorder, expert_counts


def fill_profile(options: OffloadOptions, config: ModelConfig) -> OffloadOptions:
    """The options with what `profile_trace` says, where a policy asks for it.

    Raises:
      ConfigError: a trace of another model.
    """
    if options.profile_trace is None:
        return options
    trace = read_trace(options.profile_trace)
    L, E = config.num_layers, config.moe.num_experts
    if trace.num_experts != E or trace.num_layers > L:
        raise ConfigError(
            f"trace {options.profile_trace} has {trace.num_layers} layers of "
            f"{trace.num_experts} experts, the model {L} of {E}; record one of this "
            "model (launch/generate.py --trace)"
        )
    counts_LE = np.zeros((L, E), np.int64)
    counts_LE[: trace.num_layers] = expert_counts(trace, DECODE)
    changes = {}
    if options.eviction == "static_oracle":
        changes["eviction_options"] = {"profile": counts_LE} | options.eviction_options
    if options.slot_plan == "adapmoe_dp":
        curves = static_hit_curves(counts_LE[list(config.moe_layers)])
        given = {"hit_curves": curves, "top_k": config.moe.top_k}
        changes["slot_plan_options"] = given | options.slot_plan_options
    return dataclasses.replace(options, **changes)


def make_spec(
    options: OffloadOptions,
    weights: Weights,
    store: HostStore,
    batch: int,
    capacity: int,
) -> CacheSpec:
    """Slots that the budget buys beside weights and a KV cache of that size."""
    config = weights.config
    staged = 0 if jax.default_backend() == "cpu" else DonatedSlots.max_staged + 1
    total = slots_for(
        parse_budget(options.device_memory),
        store.block_bytes,
        store.num_blocks,
        dense_bytes=weights.num_bytes,
        kv_bytes=cache_bytes(config, batch, capacity),
        staging_bytes=staged * store.block_bytes,
        machine_bytes=device_memory_bytes(),
    )
    layer_S = plan_slots(
        options.slot_plan,
        total,
        config.num_layers,
        store.num_experts,
        config.moe_layers,
        **options.slot_plan_options,
    )
    top_k = config.moe.top_k
    return CacheSpec(config.num_layers, store.num_experts, top_k, layer_S)


def make_predictor(options: OffloadOptions, weights: Weights):
    """The predictor by name; those that run routers are given the model's."""
    given = dict(options.predictor_options)
    if options.predictor in ("stale_gate", "n_layer_gate"):
        given |= {"config": weights.config, "layers": weights.layers}
    predictor = get_predictor(options.predictor, **given)
    if isinstance(predictor, GatePredictor) and predictor.look_ahead < options.horizon:
        raise ConfigError(
            f"horizon {options.horizon} exceeds what {options.predictor} looks ahead "
            f"({predictor.look_ahead}); lower it or use n_layer_gate"
        )
    return predictor


def check_offload(reader, options: OffloadOptions) -> OffloadOptions:
    """What `make_offloaded` would refuse, judged without reading weights.

    Returns:
      the options, filled by `fill_profile`.
    Raises: as `make_offloaded`, but for what an absolute budget has to hold beside
    the slots.
    """
    config = reader.config
    options = fill_profile(options, config)
    if not config.moe_layers:
        raise ConfigError(
            f"{reader.path} is a dense model: no experts to offload; run it resident"
        )
    route = get_route(options.route, **options.route_options)
    if config.moe.has_proxy_gate and not route.lossless:
        raise ConfigError(
            f"route {options.route} compares router weights, which sub-experts of a "
            f"{config.moe.gate} gate share with their parent; use a linear gate or "
            "route topk"
        )
    if options.horizon > config.num_layers:
        raise ConfigError(
            f"horizon {options.horizon} exceeds the model's {config.num_layers} layers"
        )
    block_bytes = reader.layout.size * device_dtype(reader.dtype).itemsize
    blocks = len(config.moe_layers) * config.moe.num_experts
    total = slots_for(
        parse_budget(options.device_memory),
        block_bytes,
        blocks,
        machine_bytes=device_memory_bytes(),
    )
    plan_slots(
        options.slot_plan,
        total,
        config.num_layers,
        config.moe.num_experts,
        config.moe_layers,
        **options.slot_plan_options,
    )
    return options


def device_memory_bytes() -> int | None:
    """What the device has in all; None if it does not say."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    if jax.default_backend() == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def make_offloaded(
    reader,
    options: OffloadOptions,
    *,
    check_finite: bool = False,
    batch: int = 1,
    capacity: int = 1024,
    recorder: Recorder | None = None,
    with_trace: bool = False,
    trace_scores: bool = True,
) -> LayeredEngine | FusedEngine:
    """Loads a checkpoint whose experts stay on the host.

    Args:
      reader: an open checkpoint.
      options: budget and policies.
      check_finite: refuse NaN and infinity in the dense weights.
      batch, capacity: sequences and tokens for whose KV cache an absolute budget
        leaves room.
      recorder: of events.
      with_trace: keep every lookup in `engine.trace`.
      trace_scores: with the scores of all experts, which costs a read a layer.
    Raises:
      CapacityError: a budget of fewer than two slots, or above the machine.
      ConfigError: options that do not fit the model.
    """
    config = reader.config
    options = check_offload(reader, options)
    weights = load_weights(reader, check_finite=check_finite, with_experts=False)
    store = HostStore(reader, options.memory)
    spec = make_spec(options, weights, store, batch, capacity)
    kv_limit_bytes = None
    if parse_budget(options.device_memory).bytes is not None:
        kv_limit_bytes = cache_bytes(config, batch, capacity)
    if options.mode == "fused":
        if with_trace or (recorder is not None and recorder.enabled):
            raise ConfigError(
                "mode fused writes no traces and no events, only counters; use mode "
                "layered"
            )
        hosts = [
            pin_records(store.records(layer)) if layer in store.moe_layers else None
            for layer in range(config.num_layers)
        ]
        policy = get_policy(options.eviction, **options.eviction_options)
        route = get_route(options.route, **options.route_options)
        route = None if route.lossless else route
        engine = FusedEngine(weights, hosts, spec, policy, route=route)
        engine.kv_limit_bytes = kv_limit_bytes
        return engine
    parts = layered_parts(options, weights, store, spec, recorder)
    trace = TraceRecorder(spec.num_experts, spec.top_k) if with_trace else None
    engine = LayeredEngine(weights, **parts, trace=trace, trace_scores=trace_scores)
    engine.kv_limit_bytes = kv_limit_bytes
    return engine


def layered_parts(
    options: OffloadOptions,
    weights: Weights,
    store: HostStore,
    spec: CacheSpec,
    recorder: Recorder | None = None,
) -> dict[str, Any]:
    """What a `LayeredEngine` is made of by these options: manager, route, assist.

    The queue's thread starts here, after all that may be refused.
    """
    predictor = make_predictor(options, weights)
    policy = get_policy(options.eviction, **options.eviction_options)
    route = get_route(options.route, **options.route_options)
    cache = SlotCache(spec, policy)
    slots = make_slots(spec.num_slots, store.record_size, store.dtype)
    link = options.link()
    assist = None
    if options.assist is not None:
        assist = Assist(weights.config, store, link, options.assist)
    manager = OffloadManager(
        cache,
        TransferQueue(store, slots, link, recorder, asynchronous=options.asynchronous),
        predictor=predictor,
        horizon=options.horizon,
        prefetch_limit=options.prefetch_limit,
        recorder=recorder,
    )
    return {"manager": manager, "route": route, "assist": assist}

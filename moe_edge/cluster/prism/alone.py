"""A server that asks nobody: MoE-Infinity, the baseline of Prism's table I.

Blocks that its slots lack come from its own host memory over an emulated link. The
engine, cache, eviction policy and predictor are those of `moe-edge generate`, but
programs do not run inline (`engine/inline.py`).
"""

from typing import Any

from moe_edge.engine.layer_programs import LayerPrograms
from moe_edge.engine.layered import LayeredEngine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import assemble
from moe_edge.engine.weights import Weights
from moe_edge.offload.store import HostStore
from moe_edge.route.base import Route, TopK


def load_alone(
    reader,
    weights: Weights,
    slots: int,
    bytes_per_s: float | None,
    programs: LayerPrograms,
    route: Route | None = None,
) -> LayeredEngine:
    """An engine with so many slots over all layers; all blocks go to host memory.

    Args:
      slots: all that the server has, so it may hold a block or two more than a
        placement, which leaves slots free for blocks that are lost or on their way.
      weights: all but the experts.
      bytes_per_s: of the emulated link; None: as fast as the memory.
      programs: of the model, shared with the server's other engine.
      route: what decode steps compute; None: the model's own choice.
    """
    config = weights.config
    blocks = len(config.moe_layers) * config.moe.num_experts
    options = OffloadOptions(
        device_memory=f"{100 * min(slots / blocks, 1):.9f}%",
        mode="layered",
        slot_plan="one_pool",
        eviction="moe_infinity",
        predictor="moe_infinity",
        link_bytes_per_s=bytes_per_s,
        route=route or TopK(),
    )
    return assemble(options, weights, HostStore(reader), programs=programs)


def moved(engine: LayeredEngine) -> dict[str, Any]:
    """What a run has counted; hits and misses of prefill and decode together."""
    report = engine.report()
    phases = report["decode"], report["prefill"]
    counts = {name: sum(phase[name] for phase in phases) for name in ("hits", "misses")}
    return counts | {"host_bytes": report["bytes_moved"]}

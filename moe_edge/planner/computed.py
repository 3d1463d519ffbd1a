"""Plans for a machine that is not here: bytes are exact, times by its roofline.

Without a trace which experts are found is a range of recorded runs; with one it is
replayed. Nothing is measured, so nothing but the bytes is certain.
"""

import dataclasses
import math

from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.hardware.models import ModelShape
from moe_edge.hardware.roofline_steps import roofline_costs
from moe_edge.hardware.specs import Gpu
from moe_edge.planner.calibrate import NONE
from moe_edge.planner.candidates import Candidate
from moe_edge.planner.costs import ModelCosts, link_of
from moe_edge.planner.described import Described
from moe_edge.planner.estimate import Estimate, exactly
from moe_edge.planner.helped import helped_costs, is_helped
from moe_edge.planner.host_memory import on_host
from moe_edge.planner.recorded_routing import hit_range
from moe_edge.planner.replayed import layer_slots

UNLIMITED_BYTES = 1 << 62  # what does not fit stays on the host


def compute_s(live: Described, gpu: Gpu, tokens: int) -> tuple[float, float]:
    """Seconds of a decode step of the batch, and of a prompt a row, all experts there.

    Args:
      tokens: of a prompt.
    """
    device = dataclasses.replace(gpu.device, memory_bytes=UNLIMITED_BYTES)
    size, K = live.dense_dtype.itemsize, live.config.moe.top_k
    shape = ModelShape.of(live.config, "the model", "its config", size)
    costs = roofline_costs(device, shape, max_batch=live.batch)
    return costs.decode_s(live.batch, K), costs.prefill_s(tokens * live.batch, K)


def load_seconds(options: OffloadOptions, gpu: Gpu, num_bytes: int) -> float:
    """Of a block over the user's emulated link, or over the machine's own."""
    own = gpu.host_link
    return link_of(options, own.bytes_per_s, own.latency_s).seconds(num_bytes)


def computed_costs(
    live: Described, gpu: Gpu, options: OffloadOptions, tokens: int
) -> ModelCosts:
    """Costs for a replay: the roofline's, without what transfers cost the host."""
    step_s, prompt_s = compute_s(live, gpu, tokens)
    load_s = load_seconds(options, gpu, live.block_bytes)
    layer_s = step_s / len(live.config.moe_layers)
    most = math.ceil(chosen_experts(live, live.batch))
    helped = helped_costs(load_s, live.block_bytes, layer_s, most)
    return ModelCosts(
        assist_s=helped if is_helped(live) else {},
        batch=live.batch,
        layered_s=step_s,
        layer_share=1.0,
        per_predictor_s={NONE: step_s},
        miss_host_s={NONE: [(load_s, 0.0)]},
        copy_s=load_s,
        prefill_s={str(tokens): {str(live.batch): prompt_s}},
        prefill_block_s=[(load_s, load_s)],
        block_bytes=live.block_bytes,
        dense_bytes=live.dense_bytes,
        noise=0.0,
        temperature=0.0,
        steps=0,
    )


def chosen_experts(live: Described, tokens: int) -> float:
    """Distinct experts of a layer that so many tokens choose, evenly drawn."""
    moe = live.config.moe
    return moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** tokens)


def computed_estimate(
    candidate: Candidate, live: Described, gpu: Gpu, tokens: int
) -> Estimate:
    """What a configuration would take: low and high by the range of routing.

    A step computes and then waits for what is absent, one block after another: nothing
    hides that at batch 1.

    Args:
      tokens: of a prompt.
    Raises:
      CapacityError: a budget of too few slots.
    """
    options = candidate.options
    slots, layers = len(layer_slots(options, live)), len(live.config.moe_layers)
    blocks = layers * live.config.moe.num_experts
    share = slots / blocks
    step_s, prompt_s = compute_s(live, gpu, tokens)
    load_s = load_seconds(options, gpu, live.block_bytes)
    hits = hit_range(share)
    step_blocks = layers * chosen_experts(live, live.batch)
    tpot_s = tuple(step_s + (1 - hit) * step_blocks * load_s for hit in hits[::-1])
    brought = layers * chosen_experts(live, tokens * live.batch)
    least_s, most_s = (1 - share) * brought * load_s, brought * load_s
    low_s = max(prompt_s, least_s)
    ttft_s = low_s, (low_s + prompt_s + most_s) / 2, prompt_s + most_s
    held = live.needs(options).other_bytes + slots * live.block_bytes
    copied, mapped = on_host(options, live)
    return Estimate(
        tpot_s=tpot_s,
        ttft_s=ttft_s,
        tokens_per_s=tuple(live.batch / s for s in tpot_s[::-1]),
        device_bytes=exactly(held),
        host_bytes=exactly(copied),
        mapped_bytes=exactly(mapped),
        hit_ratio=hits,
        ppl_ratio=candidate.ppl_ratio,
        agreement=candidate.agreement,
    )

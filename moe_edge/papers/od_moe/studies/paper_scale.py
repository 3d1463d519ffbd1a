"""OD-MoE's test bed as parts of the timing model: Mixtral-8x7B on ten nodes."""

from collections.abc import Mapping
from typing import Any

from moe_edge.hardware.cost_model import BlockShape, roofline_s
from moe_edge.hardware.models import model_shape
from moe_edge.hardware.presets import gpu, lan
from moe_edge.papers.od_moe.studies.studies import PAPER as PAPER_RECALL

SHAPE = model_shape("mixtral_8x7b")
VALUE_BYTES = 4  # the paper's model is in float32
CACHED_TOKENS_PER_S = 4.89  # table 2, Transformers with all experts on eight GPUs
KV_BYTES = 8e3 * SHAPE.num_layers  # of a token, section 4.2
MBPS = 1000.0
GROUPS = 4  # of two workers
TEST_BED = "rtx_3090"  # of the cached runs, and of all nodes but in figure 10


def parts_of(gpu_name: str, shadow_share: float) -> dict[str, Any]:
    """The model's parts at the paper's scale, with such GPUs in the workers.

    The cached model's time is the paper's, software and all. Of a layer, what is not
    its two experts' (one after the other, by the roofline) is the main node's. The
    main node sends a hidden state to each of its layer's workers in turn, and they
    send one back.

    Args:
      gpu_name: a device preset.
      shadow_share: a token's time of the shadow over the cached model's.
    """
    block = BlockShape(SHAPE.block.d_model, SHAPE.block.expert_dim, VALUE_BYTES)
    workers, network = gpu(gpu_name), lan(MBPS)
    cached_s = 1 / CACHED_TOKENS_PER_S
    layer_s = cached_s / SHAPE.num_layers
    there, own = (
        float(roofline_s(device, block.flops(1), block.num_bytes))
        for device in (gpu(TEST_BED).device, workers.device)
    )
    message_s = network.seconds(SHAPE.top_k * block.token_bytes)
    return {
        "layers": SHAPE.num_layers,
        "main_s": layer_s - SHAPE.top_k * there + message_s,
        "worker_s": own + message_s,
        "load_s": workers.host_link.seconds(block.num_bytes),
        "reload_s": workers.host_link.seconds(block.num_bytes),
        "shadow_s": shadow_share * cached_s,
        "groups": GROUPS,
        "kv_s": network.busy_s(KV_BYTES),
    }


def scaled_recall(ours: Mapping[int, float], precision: str) -> dict[int, float]:
    """By KV period, from ours: every step aligned is the paper's, misses in proportion.

    A precision that the paper does not name stays ours.
    """
    best = max(ours.values())
    at_best = PAPER_RECALL.get(precision, best)
    scale = (1 - at_best) / (1 - best) if best < 1 else 1.0
    return {period: 1 - scale * (1 - recall) for period, recall in ours.items()}

"""Random Hugging Face models with pairwise different sizes, by transformers itself.

Imported by parity tests only: needs torch and transformers.
"""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.tiny_checkpoints import FAMILIES as ALL
from tests.support.tiny_checkpoints import REMOTE_CODE, raw_config

FAMILIES = tuple(family for family in ALL if family not in REMOTE_CODE)
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 40,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
# Norms multiply by one more than their weights, but for that of the delta-net.
PLUS_ONE = ("qwen3_next", "qwen3_5_moe_text")
# Beyond the families' tiny configs: paths of the maths that those do not take.
VARIANTS = {
    "olmoe-norm": ("olmoe", {"norm_topk_prob": True, "attention_bias": True}),
    "mixtral-linear": (
        "mixtral",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    ),
    "qwen2_moe-window": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 11, "norm_topk_prob": True},
    ),
    "qwen3_moe-window": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 11, "attention_bias": True},
    ),
    "qwen3_moe-llama3": (
        "qwen3_moe",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 40,
            }
        },
    ),
    "deepseek_v2-greedy": (
        "deepseek_v2",
        {"topk_method": "greedy", "q_lora_rank": 18, "rope_scaling": None},
    ),
    "deepseek_v3-halves": (
        "deepseek_v3",
        {"rope_interleave": False, "norm_topk_prob": False, "q_lora_rank": None},
    ),
    "flex_olmo-norm": (
        "flex_olmo",
        {"norm_topk_prob": True, "attention_bias": False},
    ),
    "phimoe-longrope": (
        "phimoe",
        {
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5],
                "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
                "short_mscale": 1.2,
                "long_mscale": 1.3,
            },
            "original_max_position_embeddings": 80,
            "lm_head_bias": False,
            "sliding_window": 11,
            "router_jitter_noise": 0.01,
        },
    ),
    "glm4_moe-groups": (
        "glm4_moe",
        {
            "partial_rotary_factor": None,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
            | {"partial_rotary_factor": 0.34},
            "use_qk_norm": False,
            "attention_bias": False,
            "n_group": 3,
            "topk_group": 2,
        },
    ),
    "glm4_moe_lite-yarn": (
        "glm4_moe_lite",
        {"rope_scaling": YARN, "rope_interleave": False, "q_lora_rank": None},
    ),
    "solar_open-yarn": (
        "solar_open",
        {"rope_scaling": YARN, "attention_bias": True},
    ),
    "dots1-full": (
        "dots1",
        {"attention_bias": True, "sliding_window": None, "norm_topk_prob": False},
    ),
    "ernie4_5_moe-interval": (
        "ernie4_5_moe",
        {"moe_layer_interval": 2, "moe_num_shared_experts": 0}
        | {"tie_word_embeddings": False},
    ),
    # All positions are chosen up to the last one.
    "deepseek_v32-border": (
        "deepseek_v32",
        {"index_topk": 70, "n_group": 1, "topk_group": 1},
    ),
    "gpt_oss-plain-rope": (
        "gpt_oss",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
}
CASES = {family: (family, {}) for family in FAMILIES} | VARIANTS


def hf_checkpoint(
    case: str,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    as_published: bool = True,
    **further,
) -> Path:
    """Builds the random model of a case, saves it and returns its folder.

    Weights, norms, biases and sinks are all drawn, so that none is a neutral 0 or 1.

    Args:
      as_published: False: in the names and fused experts of transformers 5.
      **further: fields of its config.
    """
    family, changes = CASES[case]
    raw = raw_config(family, **changes | further)
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    torch.manual_seed(sum(map(ord, case)))
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name.endswith("inv_freq"):
                continue
            if family in PLUS_ONE and "norm" in name and "linear_attn" not in name:
                tensor.copy_(0.2 * torch.randn_like(tensor))
            elif "norm" in name or name.endswith(("scale", "scalar")):
                tensor.copy_(1 + 0.2 * torch.randn_like(tensor))
            elif tensor.ndim > 1:
                tensor.copy_(1.2 * torch.randn_like(tensor) / tensor.shape[-1] ** 0.5)
            else:
                tensor.copy_(0.3 * torch.randn_like(tensor))
    model.save_pretrained(folder, save_original_format=as_published)
    return folder


def load_model(folder: Path, **options):
    """transformers' model of a folder, in eval mode, eager attention."""
    options |= {"attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def hf_logits(folder: Path, ids_BS) -> torch.Tensor:
    """float32 logits [B, S, V] of teacher-forced tokens."""
    with torch.no_grad():
        return load_model(folder)(torch.as_tensor(ids_BS)).logits.float()

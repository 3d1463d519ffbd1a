"""Configs of OLMoE, Mixtral, Qwen2-MoE, Qwen3-MoE and gpt-oss.

Each function returns keyword arguments of ModelConfig. Defaults are those of the
config classes of transformers 5.24, and so is the meaning of every field.
"""

from moe_edge.convert.family import NUMBERED, ExpertNames, Family, mlp_names
from moe_edge.convert.family_layers import (
    FULL,
    SLIDING,
    read_dense_layers,
    read_layer_types,
    read_windows,
)
from moe_edge.convert.family_parts import read_gqa, read_moe
from moe_edge.convert.hf_config import Fields
from moe_edge.core.checks import ConfigError

_DENSE_WIDTH = ("intermediate_size",)


def olmoe(fields: Fields) -> dict:
    attention = read_gqa(
        fields, bias=False, qk_norm="full", clip_qkv=fields.float_or_none("clip_qkv")
    )
    if attention.head_dim * attention.num_heads != fields.int("hidden_size"):
        raise ConfigError(
            f"olmoe needs num_attention_heads x head_dim = hidden_size, got "
            f"{attention.num_heads} x {attention.head_dim} and "
            f"{fields.raw['hidden_size']}"
        )
    moe = read_moe(fields, top_k=8, norm=False)
    return {"attention": attention, "moe": moe}


OLMOE = Family(
    read=olmoe,
    experts=ExpertNames(("num_experts", "num_local_experts"), width=_DENSE_WIDTH),
    max_positions=4096,
    norm_eps=1e-5,
    eos=50279,
)


def mixtral(fields: Fields) -> dict:
    windows = ()
    if fields.get("sliding_window") is not None:
        windows = (fields.int("sliding_window"),) * fields.layers
    attention = read_gqa(fields, kv_heads=8, theta=1e6, windows=windows)
    moe = read_moe(fields, top_k=2, norm_topk=True)
    return {"attention": attention, "moe": moe}


MIXTRAL = Family(
    read=mixtral,
    experts=ExpertNames(("num_local_experts", "num_experts"), width=_DENSE_WIDTH),
    max_positions=131_072,
    norm_eps=1e-5,
    eos=2,
    tensors={"router.weight": "block_sparse_moe.gate.weight"},
    expert_module="block_sparse_moe.experts.",
    expert_tensors=NUMBERED,
    # transformers 5 calls this module as that of all others.
    renamed={
        "mlp.gate.": "block_sparse_moe.gate.",
        "mlp.experts.": "block_sparse_moe.experts.",
    },
)


def qwen2_moe(fields: Fields) -> dict:
    sliding = fields.bool("use_sliding_window", False)
    window = fields.get("sliding_window", 4096)
    first = fields.int("max_window_layers", 28, low=0)
    # Without layer_types, every second of the first max_window_layers slides.
    types = read_layer_types(fields, lambda i: sliding and i % 2 == 0 and i < first)
    attention = read_gqa(
        fields,
        kv_heads=16,
        qkv_bias=fields.bool("qkv_bias", True),
        windows=read_windows(types, window if sliding else None),
    )
    shared_dim = fields.int("shared_expert_intermediate_size", low=0)
    moe = read_moe(
        fields, top_k=4, norm=False, shared_dim=shared_dim, shared_gate=shared_dim > 0
    )
    dense = read_dense_layers(fields, 5632)
    return dense | {"attention": attention, "moe": moe}


QWEN2_MOE = Family(
    read=qwen2_moe,
    experts=ExpertNames(("num_experts",)),
    max_positions=32_768,
    norm_eps=1e-6,
    tensors=mlp_names("shared", "mlp.shared_expert."),
)


def qwen3_moe(fields: Fields) -> dict:
    # Every layer slides or none: transformers does not read layer_types here.
    sliding = fields.bool("use_sliding_window", False)
    window = fields.get("sliding_window", 4096)
    sliding = sliding and window is not None
    fields.get("max_window_layers")
    types = read_layer_types(fields, lambda _: sliding)
    uniform = SLIDING if sliding else FULL
    if set(types) != {uniform}:
        raise ConfigError(
            f"layer_types of qwen3_moe is {types}, expected {uniform!r} in every "
            f"layer (use_sliding_window is {sliding})"
        )
    attention = read_gqa(
        fields,
        kv_heads=4,
        bias=False,
        qk_norm="head",
        windows=read_windows(types, window),
    )
    moe = read_moe(fields, top_k=8, norm=False)
    dense = read_dense_layers(fields, 6144)
    return dense | {"attention": attention, "moe": moe}


QWEN3_MOE = Family(
    read=qwen3_moe,
    experts=ExpertNames(("num_experts", "num_local_experts")),
    max_positions=32_768,
    norm_eps=1e-6,
)


def gpt_oss(fields: Fields) -> dict:
    fields.only("hidden_act", ("silu",), "gpt-oss experts use clamped swiglu")
    fields.only("swiglu_alpha", (1.702, None), "fixed in this family")
    fields.get("initial_context_length")
    types = read_layer_types(fields, lambda i: i % 2 == 0)
    default_rope = {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    attention = read_gqa(
        fields,
        kv_heads=8,
        theta=150_000.0,
        default_rope=default_rope,
        bias=True,
        sinks=True,
        windows=read_windows(types, fields.get("sliding_window", 128)),
    )
    moe = read_moe(
        fields,
        top_k=4,
        scoring="softmax_topk",
        router_bias=True,
        expert_bias=True,
        activation="clamped_swiglu",
        swiglu_limit=fields.float("swiglu_limit", 7.0),
    )
    return {"attention": attention, "moe": moe}


GPT_OSS = Family(
    read=gpt_oss,
    experts=ExpertNames(
        ("num_local_experts", "num_experts"),
        ("num_experts_per_tok", "experts_per_token"),
        _DENSE_WIDTH,
    ),
    max_positions=131_072,
    norm_eps=1e-5,
    tensors={"router.weight": "mlp.router.weight"},
    fused="columns",
    exported=False,
)

"""Fields that a family does not read, and the values with which they change nothing.

Writers add the fields of other families to a config.json. Such a field is accepted
where it says what the model does anyway, and refused where it asks for something else.
"""

from typing import Any

from moe_edge.model.config import ModelConfig

# Parts that no family here has.
_ABSENT = {
    "is_causal": (True,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "per_layer_config": (),
    "lm_head_bias": (False,),
    "use_mrope": (False,),
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "embedding_multiplier": (1,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "residual_multiplier": (1,),
    "num_mtp_layers": (0,),
    "num_nextn_predict_layers": (0,),
}


def neutral_values(config: ModelConfig) -> dict[str, tuple]:
    """Field -> values, besides null, with which it says what `config` does anyway."""
    return _ABSENT | _attention(config) | _experts(config) | _layers(config)


def _attention(config: ModelConfig) -> dict[str, tuple]:
    attention, raw = config.attention, config.hf_config
    windows = attention.windows or (None,) * config.num_layers
    biases = {attention.qkv_bias, attention.out_bias}
    any_bias = any(biases) or config.moe.expert_bias or config.moe.router_bias
    sliding = attention.windows != ()
    window = raw.get("sliding_window")
    never = raw.get("use_sliding_window") is False or (
        isinstance(window, int) and window >= config.max_positions
    )
    return {
        "attention_bias": tuple(biases) if len(biases) == 1 else (),
        "attention_out_bias": (attention.out_bias,),
        "qkv_bias": (attention.qkv_bias,),
        "bias": (any_bias,),
        "use_bias": (any_bias,),
        "clip_qkv": (attention.clip_qkv,),
        "head_dim": (attention.head_dim,),
        "rope_interleave": tuple({rope.interleaved for rope in config.ropes}),
        "use_qk_norm": (attention.qk_norm != "none",),
        "use_sliding_window": (sliding,),
        "sliding_window": (window,) if never and not sliding else (),
        "max_window_layers": () if sliding else (raw.get("max_window_layers"),),
        "layer_types": (
            [f"{'full' if w is None else 'sliding'}_attention" for w in windows],
        ),
    }


def expert_sizes(config: ModelConfig) -> dict[str, tuple]:
    """Numbers and widths of experts."""
    moe = config.moe
    shared = moe.shared_dim / moe.expert_dim
    return {
        "num_experts": (moe.num_experts,),
        "num_local_experts": (moe.num_experts,),
        "n_routed_experts": (moe.num_experts,),
        "num_experts_per_tok": (moe.top_k,),
        "experts_per_token": (moe.top_k,),
        "moe_intermediate_size": (moe.expert_dim,),
        "n_shared_experts": (shared,),
        "num_shared_experts": (shared,),
    }


def _experts(config: ModelConfig) -> dict[str, tuple]:
    moe = config.moe
    # Softmax over the chosen sums to one, as if normalised.
    chosen = moe.scoring == "softmax_topk"
    plain = moe.num_groups == 1 and not moe.correction_bias
    return expert_sizes(config) | {
        "mlp_bias": (moe.expert_bias,),
        "norm_topk_prob": (moe.norm_topk or chosen,),
        "routed_scaling_factor": (moe.routed_scaling,),
        "scoring_func": ("softmax" if chosen else moe.scoring,),
        "n_group": (moe.num_groups,),
        "topk_group": (moe.topk_groups,),
        "topk_method": ("greedy",) if plain else (),
        "swiglu_limit": (moe.swiglu_limit,),
        "shared_expert_intermediate_size": (moe.shared_dim,),
    }


def _layers(config: ModelConfig) -> dict[str, tuple]:
    """Which layers are dense; where they are the first ones, a number says it."""
    dense = list(config.dense_layers)
    first = dense == list(range(len(dense)))
    is_moe = [int(layer in config.moe_layers) for layer in range(config.num_layers)]
    return {
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], dense),
        "first_k_dense_replace": (len(dense),) if first else (),
        "moe_layer_freq": (1, is_moe) if first else (is_moe,),
    }


def is_dropout(name: str) -> bool:
    """Whether a field is a rate of dropout, which acts in training only."""
    return "dropout" in name or name.endswith("_pdrop")


def same(value: Any, allowed: Any) -> bool:
    """Whether two values of a config.json are equal; true is not 1."""
    return isinstance(value, bool) == isinstance(allowed, bool) and value == allowed

"""The architecture of the default model, as Hugging Face writes and as we read it."""

from typing import Any

from moe_edge.model.attention_config import AttentionConfig, RopeConfig
from moe_edge.model.config import ModelConfig, MoeConfig


def default_config(
    vocab_size: int = 4096,
    *,
    d_model: int = 192,
    num_layers: int = 6,
    head_dim: int = 32,
    num_experts: int = 64,
    top_k: int = 8,
    expert_dim: int = 64,
    shared_dim: int = 32,
    norm_topk: bool = False,
    max_positions: int = 1024,
) -> ModelConfig:
    """A Qwen2-MoE model; the defaults have 16.5 M parameters, 4.1 M of them active."""
    num_heads = d_model // head_dim
    return ModelConfig(
        model_type="qwen2_moe",
        vocab_size=vocab_size,
        d_model=d_model,
        num_layers=num_layers,
        attention=AttentionConfig(
            num_heads=num_heads,
            # A third of the heads: keys and values are the cache of every token.
            num_kv_heads=max(1, num_heads // 3),
            head_dim=head_dim,
            rope=RopeConfig(dim=head_dim),
            qkv_bias=True,
        ),
        moe=MoeConfig(
            num_experts=num_experts,
            top_k=top_k,
            expert_dim=expert_dim,
            shared_dim=shared_dim,
            shared_gate=True,
            norm_topk=norm_topk,
        ),
        max_positions=max_positions,
        tie_embeddings=False,
        eos_ids=(0,),
    )


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """`config.json` of a Qwen2-MoE model in the dialect of transformers 5."""
    attention, moe = config.attention, config.moe
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "hidden_act": config.activation,
        "intermediate_size": moe.shared_dim,
        "moe_intermediate_size": moe.expert_dim,
        "shared_expert_intermediate_size": moe.shared_dim,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.norm_topk,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "qkv_bias": attention.qkv_bias,
        "max_position_embeddings": config.max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": attention.rope.theta},
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": config.eos_ids[0],
        "pad_token_id": config.eos_ids[0],
        "dtype": "bfloat16",
    }

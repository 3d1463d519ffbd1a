"""LFM2 with experts: gated short convolutions in most layers, attention in the others.

Defaults and the meaning of every field are those of transformers 5.24. Experts are
chosen by sigmoid scores and a bias, their weights divided by their sum and a millionth.
"""

from moe_edge.convert.family import NUMBERED, ExpertNames, Family, mlp_names
from moe_edge.convert.family_layers import listed_layers, state_kinds
from moe_edge.convert.family_parts import read_gqa, read_moe
from moe_edge.convert.hf_config import REQUIRED, Fields
from moe_edge.core.checks import ConfigError
from moe_edge.model.state_config import ConvConfig

_FULL, _CONV = "full_attention", "conv"


def lfm2_moe(fields: Fields) -> dict:
    if "tie_embedding" in fields.raw:  # as published files call it
        tied = fields.bool("tie_embedding")
        fields.raw = fields.raw | {"tie_word_embeddings": tied}
    if fields.get("layer_types", REQUIRED) is None:
        raise ConfigError(
            "layer_types is null, expected a list of full_attention and conv; take "
            "them from the published config.json"
        )
    types = listed_layers(fields, "layer_types", (_FULL, _CONV))
    fields.only("conv_bias", (False,), "biases of convolutions are not implemented")
    attention = read_gqa(fields, kv_heads=8, theta=1e6, qk_norm="head")
    conv = ConvConfig(
        dim=fields.int("hidden_size"), kernel=fields.int("conv_L_cache", 3, low=2)
    )
    moe = read_moe(
        fields,
        top_k=4,
        width=1792,
        norm=True,
        norm_epsilon=1e-6,
        scoring="sigmoid",
        correction_bias=fields.bool("use_expert_bias", True),
        routed_scaling=fields.float("routed_scaling_factor", 1.0),
    )
    dense = min(fields.int("num_dense_layers", 2, low=0), fields.layers)
    return state_kinds(fields, attention, conv, [each == _CONV for each in types]) | {
        "norm_eps": fields.float("norm_eps", 1e-5),
        "moe": moe,
        "dense_layers": tuple(range(dense)),
        "dense_dim": fields.int("intermediate_size", 7168),
    }


LFM2_MOE = Family(
    read=lfm2_moe,
    experts=ExpertNames(("num_experts",)),
    max_positions=128_000,
    norm_eps=1e-5,
    tied=True,
    bos=1,
    eos=2,
    tensors={
        "final_norm": "model.embedding_norm.weight",
        "attn_norm": "operator_norm.weight",
        "mlp_norm": "ffn_norm.weight",
        "attn.o": "self_attn.out_proj.weight",
        "attn.q_norm": "self_attn.q_layernorm.weight",
        "attn.k_norm": "self_attn.k_layernorm.weight",
        "attn.in_proj": "conv.in_proj.weight",
        "attn.conv": "conv.conv.weight",
        "attn.out_proj": "conv.out_proj.weight",
        "router.weight": "feed_forward.gate.weight",
        "router.correction_bias": "feed_forward.expert_bias",
        **mlp_names("mlp", "feed_forward.", NUMBERED),
    },
    expert_module="feed_forward.experts.",
    expert_tensors=NUMBERED,
)

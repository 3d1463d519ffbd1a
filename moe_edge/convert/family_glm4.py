"""Configs of GLM-4.5 to 4.7, GLM-4.7-Flash and Solar Open.

Each function returns keyword arguments of ModelConfig. Defaults and the meaning of
every field are those of transformers 5.24. All choose experts as DeepSeek-V3 does.
"""

from moe_edge.convert.family import DEEPSEEK_EXPERTS, Family
from moe_edge.convert.family_layers import read_first_dense, typed_dense_layers
from moe_edge.convert.family_parts import read_gqa, read_mla, read_moe_v3, read_mtp
from moe_edge.convert.hf_config import Fields


def glm4_moe(fields: Fields) -> dict:
    """Half of each head is rotated; biases of q, k and v, never of the output."""
    read_mtp(fields)
    attention = read_gqa(
        fields,
        kv_heads=8,
        rotated=0.5,
        qkv_bias=fields.bool("attention_bias", False),
        qk_norm="head" if fields.bool("use_qk_norm", False) else "none",
    )
    moe = read_moe_v3(fields, top_k=8, width=1408, shared=1)
    return read_first_dense(fields, 1) | {"attention": attention, "moe": moe}


def glm4_moe_lite(fields: Fields) -> dict:
    """Latent attention; layers are dense by `mlp_layer_types`."""
    read_mtp(fields)
    interleaved = fields.bool("rope_interleave", True)
    attention = read_mla(fields, interleaved, nope=192, values=256, q_rank=768)
    moe = read_moe_v3(fields, top_k=4, width=1536, shared=1, scaling=1.8)
    return {
        "dense_layers": typed_dense_layers(fields, (0,)),
        "dense_dim": fields.int("intermediate_size", 10_240),
        "attention": attention,
        "moe": moe,
    }


def solar_open(fields: Fields) -> dict:
    """Whole heads are rotated, no layer is dense, q and k have no norms."""
    fields.get("intermediate_size")  # of dense layers, which there are none of
    attention = read_gqa(
        fields,
        kv_heads=8,
        head_dim=128,
        theta=1e6,
        qkv_bias=fields.bool("attention_bias", False),
    )
    moe = read_moe_v3(fields, top_k=8, width=1280, shared=1)
    return {"attention": attention, "moe": moe}


GLM4_MOE = Family(
    read=glm4_moe, experts=DEEPSEEK_EXPERTS, max_positions=131_072, norm_eps=1e-5
)
GLM4_MOE_LITE = Family(
    read=glm4_moe_lite,
    experts=DEEPSEEK_EXPERTS,
    max_positions=202_752,
    norm_eps=1e-5,
    bos=0,
    eos=1,
)
SOLAR_OPEN = Family(
    read=solar_open, experts=DEEPSEEK_EXPERTS, max_positions=131_072, norm_eps=1e-5
)

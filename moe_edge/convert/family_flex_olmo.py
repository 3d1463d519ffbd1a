"""FlexOlmo: OLMoE's attention and router, norms behind both branches and none before.

Defaults and meaning of the fields are those of transformers 5.24.
"""

from moe_edge.convert.family import ExpertNames, Family
from moe_edge.convert.family_parts import read_gqa, read_moe
from moe_edge.convert.hf_config import Fields


def flex_olmo(fields: Fields) -> dict:
    return {
        "attention": read_gqa(fields, theta=500_000.0, bias=False, qk_norm="full"),
        "moe": read_moe(fields, top_k=5, width=11_008, norm=False),
        "norm_before": False,
        "norm_after": True,
    }


FLEX_OLMO = Family(
    read=flex_olmo,
    experts=ExpertNames(
        ("num_experts", "num_local_experts"), width=("intermediate_size",)
    ),
    max_positions=4096,
    norm_eps=1e-6,
    eos=100_257,
    tensors={
        "attn_after_norm": "post_attention_layernorm.weight",
        "mlp_after_norm": "post_feedforward_layernorm.weight",
    },
)

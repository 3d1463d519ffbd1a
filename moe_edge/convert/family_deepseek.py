"""Configs of DeepSeek-V2, V3 (Kimi-K2), DeepSeek-MoE-16B and XVERSE-MoE.

Each function returns keyword arguments of ModelConfig. V2 and V3 follow transformers
5.24; the other two are remote-code models, their facts are in the docstrings.
"""

from moe_edge.convert.family import DEEPSEEK_EXPERTS, ExpertNames, Family
from moe_edge.convert.family_layers import read_first_dense
from moe_edge.convert.family_parts import (
    read_gqa,
    read_mla,
    read_moe,
    read_moe_v3,
    read_mtp,
)
from moe_edge.convert.hf_config import REQUIRED, Fields


def deepseek_v2(fields: Fields) -> dict:
    """DeepSeek-V2: transformers never normalises the top-k weights."""
    # Not read by transformers' DeepSeek-V2; every published config says false.
    fields.bool("norm_topk_prob", False)
    grouped = fields.choice(
        "topk_method", "greedy", {"greedy": False, "group_limited_greedy": True}
    )
    for name in ("n_group", "topk_group"):
        fields.get(name)  # greedy routing does not read them
    moe = read_moe(
        fields,
        shared=2,
        routed_scaling=fields.float("routed_scaling_factor", 1.0),
        num_groups=fields.int("n_group") if grouped else 1,
        topk_groups=fields.int("topk_group") if grouped else 1,
        group_score="max",
    )
    dense = read_first_dense(fields, 0)
    attention = read_mla(fields, interleaved=True)
    return dense | {"attention": attention, "moe": moe}


DEEPSEEK_V2 = Family(
    read=deepseek_v2,
    experts=DEEPSEEK_EXPERTS._replace(experts=("n_routed_experts", "num_experts")),
    max_positions=2048,
    norm_eps=1e-6,
    eos=2,
)


def deepseek_v3(fields: Fields) -> dict:
    """DeepSeek-V3 and Kimi-K2."""
    read_mtp(fields)
    moe = read_moe_v3(fields, top_k=8, width=2048, shared=1, scaling=2.5, groups=(8, 4))
    attention = read_mla(fields, fields.bool("rope_interleave", True))
    return read_first_dense(fields, 3) | {"attention": attention, "moe": moe}


DEEPSEEK_V3 = Family(
    read=deepseek_v3, experts=DEEPSEEK_EXPERTS, max_positions=4096, norm_eps=1e-6, eos=1
)


def deepseek(fields: Fields) -> dict:
    """DeepSeek-MoE-16B (remote code): softmax routing, plain attention.

    Layer i is MoE if i >= first_k_dense_replace and i % moe_layer_freq == 0.
    """
    first = fields.int("first_k_dense_replace", 0, low=0)
    step = fields.int("moe_layer_freq", 1)
    layers = range(fields.layers)
    return {
        "dense_layers": tuple(i for i in layers if i < first or i % step),
        "dense_dim": fields.int("intermediate_size"),
        "attention": read_gqa(fields, bias=False),
        "moe": read_moe(fields, norm=False),
    }


DEEPSEEK = Family(
    read=deepseek,
    experts=DEEPSEEK_EXPERTS._replace(experts=("n_routed_experts",)),
    max_positions=2048,
    norm_eps=1e-6,
)


def xverse(fields: Fields) -> dict:
    """XVERSE-MoE (remote code): every layer MoE, shared experts as one block."""
    moe = read_moe(fields, norm=False)
    return {"attention": read_gqa(fields), "moe": moe}


XVERSE = Family(
    read=xverse,
    experts=ExpertNames(
        ("num_experts",),
        ("moe_top_k", "num_experts_per_tok"),
        ("intermediate_size",),
        ("num_shared_experts",),
    ),
    max_positions=REQUIRED,
    norm_eps=1e-6,
    tensors={"router.weight": "mlp.router.weight"},
    exported=False,
)

"""Configs of DeepSeek-V2, V3 (Kimi-K2), DeepSeek-MoE-16B and XVERSE-MoE.

Each function returns keyword arguments of ModelConfig. V2 and V3 follow transformers
5.24; the other two are remote-code models, their facts are in the docstrings.
"""

from moe_edge.convert.family import ExpertNames, Family
from moe_edge.convert.family_parts import read_gqa, read_moe
from moe_edge.convert.hf_config import REQUIRED, Fields
from moe_edge.convert.rope_config import mla_softmax_scale, rope_config, rope_dict
from moe_edge.core.checks import ConfigError
from moe_edge.model.config import AttentionConfig

EXPERTS = ExpertNames(
    ("n_routed_experts", "num_local_experts"), shared=("n_shared_experts",)
)


def _mla(fields: Fields, common: dict, interleaved: bool) -> AttentionConfig:
    """Multi-head latent attention of DeepSeek-V2 and V3."""
    for name in ("head_dim", "qk_head_dim"):
        fields.get(name)  # derived from the rope and nope widths
    heads = fields.int("num_attention_heads")
    if fields.int("num_key_value_heads", None, null=heads) != heads:
        raise ConfigError(
            f"{fields.family}: num_key_value_heads is "
            f"{fields.raw['num_key_value_heads']}, expected num_attention_heads={heads}"
        )
    nope = fields.int("qk_nope_head_dim", 128)
    rope_dim = fields.int("qk_rope_head_dim", 64)
    rank = fields.get("q_lora_rank", 1536)
    parameters = rope_dict(fields, 10_000.0)
    return AttentionConfig(
        kind="mla",
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=nope + rope_dim,
        rope=rope_config(
            fields, parameters, rope_dim, common["max_positions"], interleaved
        ),
        softmax_scale=mla_softmax_scale(fields, parameters, nope + rope_dim),
        kv_lora_rank=fields.int("kv_lora_rank", 512),
        q_lora_rank=None if rank is None else fields.int("q_lora_rank", 1536),
        nope_dim=nope,
        v_head_dim=fields.int("v_head_dim", 128),
        # transformers builds both latent norms with RMSNorm's own default.
        lora_norm_eps=1e-6,
    )


def _first_dense(fields: Fields, common: dict, first: int) -> dict:
    """The first `first_k_dense_replace` layers have a plain MLP."""
    count = fields.int("first_k_dense_replace", first, low=0)
    return {
        "dense_layers": tuple(range(min(count, common["num_layers"]))),
        "dense_dim": fields.int("intermediate_size"),
    }


def deepseek_v2(fields: Fields, common: dict) -> dict:
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
        common,
        shared=2,
        routed_scaling=fields.float("routed_scaling_factor", 1.0),
        num_groups=fields.int("n_group") if grouped else 1,
        topk_groups=fields.int("topk_group") if grouped else 1,
        group_score="max",
    )
    dense = _first_dense(fields, common, 0)
    return dense | {"attention": _mla(fields, common, interleaved=True), "moe": moe}


DEEPSEEK_V2 = Family(
    read=deepseek_v2,
    experts=EXPERTS._replace(experts=("n_routed_experts", "num_experts")),
    max_positions=2048,
    norm_eps=1e-6,
    eos=2,
)


def deepseek_v3(fields: Fields, common: dict) -> dict:
    """DeepSeek-V3 and Kimi-K2."""
    fields.only("topk_method", ("noaux_tc", None), "the only method of DeepSeek-V3")
    fields.int(
        "num_nextn_predict_layers", 1, low=0, aliases=("num_mtp_layers",), null=0
    )
    moe = read_moe(
        fields,
        common,
        top_k=8,
        width=2048,
        shared=1,
        norm=True,
        scoring="sigmoid",
        routed_scaling=fields.float("routed_scaling_factor", 2.5),
        num_groups=fields.int("n_group", 8),
        topk_groups=fields.int("topk_group", 4),
        group_score="top2",
        correction_bias=True,
    )
    if moe.num_experts // moe.num_groups < 2:
        raise ConfigError(
            f"n_group {moe.num_groups} leaves fewer than two of {moe.num_experts} "
            "experts in a group, which scores groups by their best two"
        )
    attention = _mla(fields, common, fields.bool("rope_interleave", True))
    return _first_dense(fields, common, 3) | {"attention": attention, "moe": moe}


DEEPSEEK_V3 = Family(
    read=deepseek_v3,
    experts=EXPERTS,
    max_positions=4096,
    norm_eps=1e-6,
    eos=1,
    mtp_layers=1,
)


def deepseek(fields: Fields, common: dict) -> dict:
    """DeepSeek-MoE-16B (remote code): softmax routing, plain attention.

    Layer i is MoE if i >= first_k_dense_replace and i % moe_layer_freq == 0.
    """
    bias = fields.bool("attention_bias", False)
    first = fields.int("first_k_dense_replace", 0, low=0)
    step = fields.int("moe_layer_freq", 1)
    layers = range(common["num_layers"])
    return {
        "dense_layers": tuple(i for i in layers if i < first or i % step),
        "dense_dim": fields.int("intermediate_size"),
        "attention": read_gqa(fields, common, qkv_bias=bias, out_bias=bias),
        "moe": read_moe(fields, common, norm=False),
    }


DEEPSEEK = Family(
    read=deepseek,
    experts=EXPERTS._replace(experts=("n_routed_experts",)),
    max_positions=2048,
    norm_eps=1e-6,
)


def xverse(fields: Fields, common: dict) -> dict:
    """XVERSE-MoE (remote code): every layer MoE, shared experts as one block."""
    moe = read_moe(fields, common, norm=False)
    return {"attention": read_gqa(fields, common), "moe": moe}


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

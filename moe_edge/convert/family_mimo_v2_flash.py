"""MiMo-V2-Flash: layers of two kinds, whose key/value heads, theta and sinks differ.

Defaults and the meaning of every field are those of transformers 5.24. Sliding layers
have twice the key/value heads and learned sinks. Published files state layers, widths
and thetas of the sliding layers in fields of their own (`hybrid_layer_pattern`,
`swa_*`), which transformers does not read: they must say what it computes.
"""

import dataclasses

from moe_edge.convert.family import ExpertNames, Family
from moe_edge.convert.family_layers import (
    FULL,
    SLIDING,
    layer_kinds,
    listed_layers,
    read_layer_types,
    read_windows,
    typed_dense_layers,
)
from moe_edge.convert.family_parts import read_moe_v3
from moe_edge.convert.hf_config import Fields
from moe_edge.convert.rope_config import rope_config, rope_of_type, rotated_width
from moe_edge.model.attention_config import AttentionConfig, RopeConfig

_THETAS = {FULL: 5_000_000.0, SLIDING: 10_000.0}


def mimo_v2_flash(fields: Fields) -> dict:
    types = _layer_types(fields)
    window = fields.get("sliding_window", 129)
    if fields.get("sliding_window_size") is not None:
        window = fields.int("sliding_window_size") + 1  # a token's own, too
    windows = read_windows(types, window)
    if windows:
        sizes = (window - 1, window, None)
        fields.only("attention_chunk_size", sizes, "a window's size")
    heads = fields.int("num_attention_heads")
    kv_heads = fields.int("num_key_value_heads", 4)
    head_dim, value_dim = fields.int("head_dim", 192), fields.int("v_head_dim", 128)
    for name, value in (
        ("swa_num_attention_heads", heads),
        ("swa_num_key_value_heads", 2 * kv_heads),
        ("swa_head_dim", head_dim),
        ("swa_v_head_dim", value_dim),
        ("add_swa_attention_sink_bias", True),
        ("add_full_attention_sink_bias", False),
        ("layernorm_epsilon", fields.norm_eps),
        ("hybrid_block_size", None),
    ):
        fields.only(name, (value, None), "so transformers computes this family")
    full = AttentionConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=value_dim,
        value_scale=fields.float("attention_value_scale", 0.707, null=1.0),
        rope=_rope(fields, FULL, head_dim),
        qkv_bias=fields.bool("attention_bias", False),
    )
    sliding = dataclasses.replace(
        full,
        num_kv_heads=2 * kv_heads,
        sinks=True,
        rope=_rope(fields, SLIDING, head_dim),
    )
    kinds = {FULL: full, SLIDING: sliding}
    return _mlp_layers(fields) | {
        **layer_kinds([kinds[each] for each in types], windows),
        "moe": read_moe_v3(fields, top_k=8, width=2048, shared=None),
    }


def _layer_types(fields: Fields) -> list[str]:
    """The first layer and every sixth see all positions, unless the file says which."""
    types = read_layer_types(fields, lambda i: i and (i + 1) % 6)
    pattern = listed_layers(fields, "hybrid_layer_pattern", (0, 1))
    if pattern is not None:
        types = [SLIDING if each else FULL for each in pattern]
        fields.only("layer_types", (types, None), "as hybrid_layer_pattern says")
    return types


def _rope(fields: Fields, kind: str, head_dim: int) -> RopeConfig:
    theta = fields.get("rope_theta" if kind == FULL else "swa_rope_theta")
    default = {"rope_theta": _THETAS[kind] if theta is None else theta}
    parameters = rope_of_type(fields, kind, default)
    width = rotated_width(fields, parameters, head_dim, 0.334)
    return rope_config(fields, parameters, width, False)


def _mlp_layers(fields: Fields) -> dict:
    """The first layer is dense, unless the file says which are."""
    dense = typed_dense_layers(fields, (0,))
    is_moe = listed_layers(fields, "moe_layer_freq", (0, 1))
    if is_moe is not None:
        types = ["sparse" if each else "dense" for each in is_moe]
        fields.only("mlp_layer_types", (types, None), "as moe_layer_freq says")
        dense = tuple(i for i, each in enumerate(is_moe) if not each)
    return {"dense_layers": dense, "dense_dim": fields.int("intermediate_size", 16_384)}


MIMO_V2_FLASH = Family(
    read=mimo_v2_flash,
    experts=ExpertNames(("n_routed_experts", "num_local_experts")),
    max_positions=131_072,
    norm_eps=1e-5,
    bos=1,
    tensors={"attn.sinks": "self_attn.attention_sink_bias"},
    renamed={"self_attn.sinks": "self_attn.attention_sink_bias"},
)

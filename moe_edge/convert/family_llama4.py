"""Llama 4 (text): every fourth layer without rotary, the others within chunks.

Defaults and the meaning of every field are those of transformers 5.24. In
`no_rope_layers` a 1 means that a layer has rotary. A token's score multiplies what its
one expert takes; the shared expert takes the token as it is.
"""

import dataclasses

from moe_edge.convert.family import ExpertNames, Family, mlp_names
from moe_edge.convert.family_layers import layer_kinds, listed_layers
from moe_edge.convert.family_parts import read_gqa, read_moe
from moe_edge.convert.hf_config import Fields
from moe_edge.core.checks import ConfigError

_TYPES = ("chunked_attention", "full_attention")


def llama4_text(fields: Fields) -> dict:
    full = read_gqa(
        fields, kv_heads=8, head_dim=128, theta=500_000.0, interleaved=True, bias=False
    )
    if fields.bool("use_qk_norm", True):
        full = dataclasses.replace(full, qk_norm="unit", qk_norm_after_rope=True)
    plain = dataclasses.replace(
        full, rope=None, qk_norm="none", qk_norm_after_rope=False
    )
    rate, span = fields.float("attn_scale", 0.1), fields.int("floor_scale", 8192)
    if _tunes_temperature(fields):
        plain = dataclasses.replace(plain, temperature=rate, temperature_span=span)
    has_rope = _layers_with_rope(fields)
    chunk = fields.get("attention_chunk_size", 8192)
    chunked, full_type = _TYPES
    types = listed_layers(
        fields,
        "layer_types",
        _TYPES,
        lambda i: chunked if has_rope[i] and chunk is not None else full_type,
    )
    is_chunked = [each == chunked for each in types]
    if any(is_chunked):
        chunk = fields.int("attention_chunk_size", 8192)
    attention_L = [
        dataclasses.replace(full if rope else plain, chunked=chunked)
        for rope, chunked in zip(has_rope, is_chunked, strict=True)
    ]
    windows = tuple(chunk if each else None for each in is_chunked)
    width = fields.int("intermediate_size", 8192)
    moe = read_moe(
        fields,
        top_k=1,
        width=width,
        scoring="sigmoid",
        input_scaled=True,
        shared_dim=width,
    )
    fields.only("for_llm_compressor", (False,), "a tool's own switch")
    return {
        **layer_kinds(attention_L, windows if any(is_chunked) else ()),
        "moe": moe,
        "dense_layers": _dense_layers(fields),
        "dense_dim": fields.int("intermediate_size_mlp", 16_384),
    }


def _tunes_temperature(fields: Fields) -> bool:
    """A number in published files: all but 0 mean true."""
    value = fields.get("attn_temperature_tuning", True)
    if type(value) not in (bool, int):
        raise ConfigError(
            f"attn_temperature_tuning is {value!r:.60}, expected true, false or a "
            "whole number"
        )
    return bool(value)


def _layers_with_rope(fields: Fields) -> list[int]:
    interval = fields.int("no_rope_layer_interval", 4)
    name = "no_rope_layers"
    if fields.get(name) == []:
        fields.raw = fields.raw | {name: None}
    return listed_layers(fields, name, (0, 1), lambda i: int((i + 1) % interval != 0))


def _dense_layers(fields: Fields) -> tuple[int, ...]:
    layers = fields.layers
    step = fields.int("interleave_moe_layer_step", 1)
    moe = fields.get("moe_layers")
    if moe is None:
        moe = list(range(step - 1, layers, step))
    if not isinstance(moe, list) or any(
        type(i) is not int or not 0 <= i < layers for i in moe
    ):
        raise ConfigError(
            f"moe_layers is {moe!r:.80}, expected a list of layers 0..{layers - 1}"
        )
    return tuple(i for i in range(layers) if i not in moe)


LLAMA4_TEXT = Family(
    read=llama4_text,
    experts=ExpertNames(
        ("num_local_experts", "num_experts"), width=("intermediate_size",)
    ),
    max_positions=131_072,
    norm_eps=1e-5,
    bos=1,
    eos=2,
    tensors={
        "router.weight": "feed_forward.router.weight",
        **mlp_names("mlp", "feed_forward."),
        **mlp_names("shared", "feed_forward.shared_expert."),
    },
    expert_module="feed_forward.experts.",
    fused="turned",
    whole="llama4",
    text_names={
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
        # transformers 5 in memory
        "model.language_model.": "model.",
    },
    left_out=("vision_model.", "multi_modal_projector.", "model.vision_model.")
    + ("model.multi_modal_projector.",),
    exported=False,
)

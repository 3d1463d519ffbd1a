"""Gemma 4 (text) with experts: a dense MLP beside them in every layer, and two kinds of
attention.

Defaults and the meaning of every field are those of transformers 5.24. Full layers have
head and key/value sizes of their own: newer files state them in `per_layer_config`,
older ones in `global_head_dim` and `num_global_key_value_heads`.
"""

from typing import Any

from moe_edge.convert.family import ExpertNames, Family, mlp_names
from moe_edge.convert.family_layers import (
    FULL,
    SLIDING,
    layer_kinds,
    read_layer_types,
    read_windows,
)
from moe_edge.convert.family_parts import read_moe
from moe_edge.convert.hf_config import ACTIVATIONS, Fields
from moe_edge.convert.rope_config import proportional_rope, rope_config, rope_of_type
from moe_edge.core.checks import ConfigError
from moe_edge.model.attention_config import AttentionConfig

_ROPES = {
    FULL: {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


def gemma4_text(fields: Fields) -> dict:
    if fields.int("hidden_size_per_layer_input", 256, low=0, null=0):
        raise ConfigError(
            "config.json of gemma4_text: hidden_size_per_layer_input is "
            f"{fields.get('hidden_size_per_layer_input', 256)}, expected 0 (inputs of "
            "each layer are not implemented)"
        )
    fields.get("vocab_size_per_layer_input")  # nothing without them
    fields.only("num_kv_shared_layers", (0, None), "shared keys are not implemented")
    fields.only("use_double_wide_mlp", (False,), "it is not implemented")
    fields.only(
        "use_bidirectional_attention",
        (None, "vision"),
        "text is seen one way; more is not implemented",
    )
    if not fields.bool("enable_moe_block", False):
        raise ConfigError(
            "config.json of gemma4_text: enable_moe_block is false, expected true "
            "(models without experts do not run here)"
        )
    types = read_layer_types(fields, lambda i: (i + 1) % 6)
    types = [*types[:-1], FULL]  # as transformers has the last one
    sizes = _sizes(fields, types)
    activation = fields.choice("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS)
    return layer_kinds(
        [
            _attention(fields, kind, *own)
            for kind, own in zip(types, sizes, strict=True)
        ],
        read_windows(types, fields.get("sliding_window", 512)),
    ) | {
        "moe": read_moe(
            fields,
            activation=activation,
            norm_topk=True,
            own_norms=True,
            expert_scale=True,
            shared_dim=fields.int("intermediate_size", 9216),
        ),
        "activation": activation,
        "norm_after": True,
        "embed_scale": fields.int("hidden_size") ** 0.5,
        "layer_scale": True,
        "logit_cap": fields.float_or_none("final_logit_softcapping"),
    }


def _attention(
    fields: Fields, kind: str, head_dim: int, kv_heads: int
) -> AttentionConfig:
    parameters = rope_of_type(fields, kind, _ROPES[kind])
    if parameters["rope_type"] == "proportional":
        rope = proportional_rope(fields, parameters, head_dim)
    else:
        rope = rope_config(fields, parameters, head_dim, False)
    bias = fields.bool("attention_bias", False)
    return AttentionConfig(
        num_heads=fields.int("num_attention_heads"),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope,
        softmax_scale=1.0,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        v_norm=True,
        k_is_v=fields.bool("attention_k_eq_v", False) and kind == FULL,
    )


def _sizes(fields: Fields, types: list[str]) -> list[tuple[int, int]]:
    """Width of a head and number of key/value heads of every layer."""
    plain = {
        "head_dim": fields.int("head_dim", 256),
        "num_key_value_heads": fields.int("num_key_value_heads", 4),
    }
    whole = {"head_dim": fields.int("global_head_dim", 512)}
    kv_heads: Any = fields.get("num_global_key_value_heads")
    if kv_heads is not None and fields.bool("attention_k_eq_v", False):
        whole["num_key_value_heads"] = fields.int("num_global_key_value_heads")
    changes = [whole if each == FULL else {} for each in types]
    stated = fields.get("per_layer_config")
    if stated is not None:
        changes = _stated_changes(fields, stated, len(types))
    return [tuple((plain | change).values()) for change in changes]


def _stated_changes(fields: Fields, stated: Any, layers: int) -> list[dict[str, int]]:
    """What `per_layer_config` says of every layer: an object by number of the layer."""
    known = {"head_dim", "num_key_value_heads"}
    changes: list[dict[str, int]] = [{} for _ in range(layers)]
    entries = stated.items() if isinstance(stated, dict) else [(stated, None)]
    for layer, change in entries:
        number = int(layer) if str(layer).isdecimal() else -1
        if not 0 <= number < layers or not isinstance(change, dict):
            raise ConfigError(
                f"config.json of {fields.family}: per_layer_config is {stated!r:.80}, "
                f"expected an object whose names are layers 0..{layers - 1}"
            )
        for name, value in change.items():
            if name not in known or type(value) is not int or value < 1:
                raise ConfigError(
                    f"config.json of {fields.family}: per_layer_config of layer "
                    f"{layer} says {name} is {value!r:.40}; expected numbers for "
                    f"{' and '.join(sorted(known))} alone"
                )
        changes[number] = change
    return changes


GEMMA4_TEXT = Family(
    read=gemma4_text,
    experts=ExpertNames(("num_experts",), ("top_k_experts",)),
    max_positions=131_072,
    norm_eps=1e-6,
    tied=True,
    bos=2,
    eos=1,
    tensors={
        "attn_after_norm": "post_attention_layernorm.weight",
        "mlp_norm": "pre_feedforward_layernorm.weight",
        "mlp_after_norm": "post_feedforward_layernorm.weight",
        "expert_norm": "pre_feedforward_layernorm_2.weight",
        "expert_after_norm": "post_feedforward_layernorm_2.weight",
        "shared_after_norm": "post_feedforward_layernorm_1.weight",
        "layer_scale": "layer_scalar",
        "router.weight": "router.proj.weight",
        "router.input_scale": "router.scale",
        "router.expert_scale": "router.per_expert_scale",
        **mlp_names("shared", "mlp."),
    },
    expert_module="experts.",
    fused="halves",
    whole="gemma4",
    text_names={"model.language_model.": "model."},
    left_out=(
        "model.vision_tower.",
        "model.audio_tower.",
        "model.embed_vision.",
        "model.embed_audio.",
    ),
)

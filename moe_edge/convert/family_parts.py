"""Config fields that families share: sizes, attention, windows."""

from typing import Any

from moe_edge.convert.hf_config import Fields
from moe_edge.convert.rope_config import rope_config, rope_dict
from moe_edge.core.checks import ConfigError
from moe_edge.model.config import AttentionConfig

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_MAX_LAYERS = 4096
_MAX_EXPERTS = 65_536


def _layers(fields: Fields) -> int:
    layers = fields.int("num_hidden_layers")
    if layers > _MAX_LAYERS:
        raise ConfigError(
            f"num_hidden_layers is {layers}, expected at most {_MAX_LAYERS}"
        )
    return layers


def read_experts(fields: Fields, name: str, aliases: tuple[str, ...] = ()) -> int:
    experts = fields.int(name, aliases=aliases)
    if experts > _MAX_EXPERTS:
        raise ConfigError(f"{name} is {experts}, expected at most {_MAX_EXPERTS}")
    return experts


def _activation(fields: Fields) -> str:
    return fields.choice("hidden_act", "silu", _ACTIVATIONS)


def read_common(fields: Fields, max_positions: int, norm_eps: float) -> dict:
    """Fields that every family has."""
    return {
        "num_layers": _layers(fields),
        "max_positions": fields.int("max_position_embeddings", max_positions),
        "norm_eps": fields.float("rms_norm_eps", norm_eps),
        "activation": _activation(fields),
    }


def read_gqa(
    fields: Fields,
    common: dict,
    *,
    kv_heads: Any = None,
    theta: float = 10_000.0,
    default_rope: dict | None = None,
    **parts,
) -> AttentionConfig:
    """Grouped-query attention; `head_dim` absent or null means D / H."""
    heads = fields.int("num_attention_heads")
    head_dim = fields.int("head_dim", None, null=fields.int("hidden_size") // heads)
    parameters = rope_dict(fields, theta, default_rope)
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=fields.int("num_key_value_heads", kv_heads, null=heads),
        head_dim=head_dim,
        rope=rope_config(fields, parameters, head_dim, common["max_positions"], False),
        **parts,
    )


def no_window(fields: Fields) -> None:
    """For models that ignore `sliding_window`."""
    fields.only("sliding_window", (None,), "this family has no sliding window")
    fields.only("use_sliding_window", (False, None), "no sliding window here")


def read_layer_types(fields: Fields, layers: int) -> list[str] | None:
    types = fields.get("layer_types")
    if types is None:
        return None
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or any(t not in known for t in types):
        raise ConfigError(f"layer_types is {types!r}, expected a list of {known}")
    if len(types) != layers:
        raise ConfigError(
            f"layer_types names {len(types)} layers, num_hidden_layers is {layers}"
        )
    return types


def read_windows(
    fields: Fields, types: list[str], window: Any
) -> tuple[int | None, ...]:
    """Per layer the sliding window, or () where no layer has one."""
    if "sliding_attention" not in types:
        return ()
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ConfigError(
            f"sliding_window is {window!r} but layer_types has sliding layers; "
            "expected an integer >= 1"
        )
    return tuple(window if t == "sliding_attention" else None for t in types)

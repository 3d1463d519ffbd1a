"""Config fields that families share: sizes, experts, attention, windows."""

from typing import Any

from moe_edge.convert.hf_config import REQUIRED, Fields
from moe_edge.convert.rope_config import rope_config, rope_dict, rotated_width
from moe_edge.core.checks import ConfigError
from moe_edge.model.config import AttentionConfig, MoeConfig

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_MAX_LAYERS = 4096
_MAX_EXPERTS = 65_536


def read_common(fields: Fields, max_positions: Any, norm_eps: float) -> dict:
    """Fields that every family has."""
    layers = fields.int("num_hidden_layers")
    if layers > _MAX_LAYERS:
        raise ConfigError(
            f"num_hidden_layers is {layers}, expected at most {_MAX_LAYERS}"
        )
    return {
        "num_layers": layers,
        "max_positions": fields.int("max_position_embeddings", max_positions),
        "norm_eps": fields.float("rms_norm_eps", norm_eps),
        "activation": fields.choice("hidden_act", "silu", _ACTIVATIONS),
    }


def read_moe(
    fields: Fields,
    common: dict,
    *,
    top_k: Any = REQUIRED,
    width: Any = REQUIRED,
    shared: int | None = None,
    norm: bool | None = None,
    **parts,
) -> MoeConfig:
    """Router and experts, by the family's names.

    Args:
      top_k, width: where the file is silent.
      shared: the same, of the shared expert's width in experts; None: it has none.
      norm: the same, of `norm_topk_prob`; None: the family has no such field.
      **parts: further fields of `MoeConfig`.
    """
    names = fields.experts
    experts = fields.int(names.experts[0], aliases=names.experts[1:])
    if experts > _MAX_EXPERTS:
        raise ConfigError(
            f"{names.experts[0]} is {experts}, expected at most {_MAX_EXPERTS}"
        )
    expert_dim = fields.int(names.width[0], width)
    if norm is not None:
        parts["norm_topk"] = fields.bool("norm_topk_prob", norm)
    if names.shared:
        null = 0 if shared is None else None
        count = fields.int(names.shared[0], shared, low=0, null=null)
        parts["shared_dim"] = expert_dim * count
    return MoeConfig(
        num_experts=experts,
        top_k=fields.int(names.top_k[0], top_k, aliases=names.top_k[1:]),
        expert_dim=expert_dim,
        **{"activation": common["activation"]} | parts,
    )


def read_gqa(
    fields: Fields,
    common: dict,
    *,
    kv_heads: Any = None,
    theta: float = 10_000.0,
    default_rope: dict | None = None,
    rotated: float | None = None,
    interleaved: bool = False,
    **parts,
) -> AttentionConfig:
    """Grouped-query attention; `head_dim` absent or null means D / H.

    Args:
      kv_heads, theta, default_rope: where the file is silent.
      rotated: the same, of `partial_rotary_factor`; None: the family rotates whole
        heads.
      interleaved: whether rotary pairs are (2i, 2i + 1), not halves of the head.
      **parts: further fields of `AttentionConfig`.
    """
    heads = fields.int("num_attention_heads")
    head_dim = fields.int("head_dim", None, null=fields.int("hidden_size") // heads)
    parameters = rope_dict(fields, theta, default_rope)
    width = head_dim
    if rotated is not None:
        width = rotated_width(fields, parameters, head_dim, rotated)
    positions = common["max_positions"]
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=fields.int("num_key_value_heads", kv_heads, null=heads),
        head_dim=head_dim,
        rope=rope_config(fields, parameters, width, positions, interleaved),
        **parts,
    )


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


def read_windows(types: list[str], window: Any) -> tuple[int | None, ...]:
    """Per layer the sliding window, or () where no layer has one."""
    if "sliding_attention" not in types:
        return ()
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ConfigError(
            f"sliding_window is {window!r} but layer_types has sliding layers; "
            "expected an integer >= 1"
        )
    return tuple(window if t == "sliding_attention" else None for t in types)

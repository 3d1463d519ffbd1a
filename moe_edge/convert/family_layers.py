"""Which layer of a model is dense, which attention it has, and which window."""

import dataclasses
from collections.abc import Callable, Container
from typing import Any

from moe_edge.convert.hf_config import Fields
from moe_edge.convert.neutral_fields import same
from moe_edge.core.checks import ConfigError
from moe_edge.model.attention_config import AttentionConfig
from moe_edge.model.state_config import StateConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def read_first_dense(fields: Fields, first: int) -> dict:
    """The first `first_k_dense_replace` layers have a plain MLP."""
    count = fields.int("first_k_dense_replace", first, low=0)
    return {
        "dense_layers": tuple(range(min(count, fields.layers))),
        "dense_dim": fields.int("intermediate_size"),
    }


def typed_dense_layers(fields: Fields, default: Container[int]) -> tuple[int, ...]:
    """Layers that are dense by `mlp_layer_types`, else these."""
    types = listed_layers(
        fields,
        "mlp_layer_types",
        ("dense", "sparse"),
        lambda layer: "dense" if layer in default else "sparse",
    )
    return tuple(i for i, each in enumerate(types) if each == "dense")


def read_dense_layers(fields: Fields, default_dim: int) -> dict:
    """Layer i is MoE if not in `mlp_only_layers` and (i + 1) % step == 0."""
    only = fields.get("mlp_only_layers") or []
    if not isinstance(only, list) or any(type(i) is not int for i in only):
        raise ConfigError(f"mlp_only_layers is {only!r}, expected a list of layer ids")
    step = fields.int("decoder_sparse_step", 1)
    layers = range(fields.layers)
    return {
        "dense_layers": tuple(i for i in layers if i in only or (i + 1) % step),
        "dense_dim": fields.int("intermediate_size", default_dim),
    }


def layer_kinds(attention_L: list[AttentionConfig], windows: tuple) -> dict:
    """Arguments of `ModelConfig` for layers whose attention may differ.

    Args:
      attention_L: of every layer; windows: of `read_windows`.
    """
    kinds = list(dict.fromkeys(attention_L))
    numbers = tuple(map(kinds.index, attention_L))
    return {
        "attention": dataclasses.replace(kinds[0], windows=windows),
        "other_attention": tuple(kinds[1:]),
        "attention_kinds": numbers if len(kinds) > 1 else (),
    }


def state_kinds(
    fields: Fields, attention: AttentionConfig, state: StateConfig, keeps: list[bool]
) -> dict:
    """Arguments of `ModelConfig` for layers with attention, and others with a state.

    Args:
      keeps: of every layer, whether it keeps a state.
    Raises:
      ConfigError: no layer of either kind.
    """
    if len(set(keeps)) != 2:
        which = "keep a state" if all(keeps) else "have attention"
        raise ConfigError(
            f"config.json of {fields.family}: all layers {which}, expected some of "
            "each kind in layer_types (or by full_attention_interval)"
        )
    kinds = tuple(map(int, keeps))
    return {
        "attention": attention,
        "other_attention": (state,),
        "attention_kinds": kinds,
    }


def listed_layers(
    fields: Fields, name: str, known: tuple, default: Callable[[int], Any] | None = None
) -> Any:
    """A field that holds one of the known values for every layer.

    Args:
      default: layer -> its value where the file is silent; None: the result is None.
    """
    value, layers = fields.get(name), fields.layers
    if value is None:
        return default and [default(layer) for layer in range(layers)]
    is_list = isinstance(value, list) and len(value) == layers
    if not is_list or not all(any(same(each, k) for k in known) for each in value):
        raise ConfigError(
            f"{name} is {value!r:.80}, expected a list of {layers} of {known} (one for "
            "each of num_hidden_layers)"
        )
    return value


def read_layer_types(fields: Fields, slides: Callable[[int], Any]) -> list[str]:
    """Which layers slide and which are full.

    Args:
      slides: whether a layer does, where the file is silent.
    """

    def default(layer: int) -> str:
        return SLIDING if slides(layer) else FULL

    return listed_layers(fields, "layer_types", (FULL, SLIDING), default)


def read_windows(types: list[str], window: Any) -> tuple[int | None, ...]:
    """Per layer the sliding window, or () where no layer has one."""
    if SLIDING not in types:
        return ()
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ConfigError(
            f"sliding_window is {window!r} but layer_types has sliding layers; "
            "expected an integer >= 1"
        )
    return tuple(window if t == SLIDING else None for t in types)

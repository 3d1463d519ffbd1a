"""GGUF metadata -> fields of config.json that several architectures share."""

import math
from decimal import Decimal
from typing import Any

from moe_edge.convert.gguf_metadata import Metadata

SOFTMAX, SIGMOID, SOFTMAX_CHOSEN = 1, 2, 3  # expert_gating_func
_LONG_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
ROPE_FACTORS = "rope_freqs.weight"
_ROUTER = "blk.{}.ffn_gate_inp.weight"


_ORIGINAL = "original_max_position_embeddings"


def has_bias(meta: Metadata) -> bool:
    """Whether queries, keys and values have biases."""
    names = ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")
    return any(name in meta.tensors for name in names)


def gqa(meta: Metadata, *, rotated: str | None = None, **rope_options) -> dict:
    """Grouped-query attention.

    Args:
      rotated: the field that says how much of each head is rotated, `rotary_dim` or
        `partial_rotary_factor`; None: all of it, in every model of the family.
      **rope_options: of `rope`.
    """
    heads = meta.heads
    found: dict[str, Any] = {
        "num_key_value_heads": meta.get("attention.head_count_kv", heads),
        "attention_bias": has_bias(meta),
        "rope_parameters": _with_factors(meta, rope(meta, **rope_options)),
    }
    key_length = meta.get("attention.key_length")
    if key_length is not None:
        found["head_dim"] = key_length
    else:
        key_length = meta.even_head
    meta.only("attention.value_length", key_length)
    if rotated is None:
        meta.only("rope.dimension_count", key_length)
        return found
    width = meta.integer("rope.dimension_count", key_length)
    if rotated == "rotary_dim":
        return found | {rotated: width}
    found["rope_parameters"][rotated] = share(width, key_length)
    return found


def share(width: int, whole: int) -> float:
    """The number that times `whole`, rounded down, is `width`."""
    found = width / max(whole, 1)
    return found if int(found * whole) == width else math.nextafter(found, math.inf)


def layer_types(slides: list[int]) -> list[str]:
    """Of layers, whether they slide."""
    return ["sliding_attention" if each else "full_attention" for each in slides]


def only_router(meta: Metadata, scoring: int, norm: bool | None = None) -> None:
    """Refuses a router with another rule than the only one of its family.

    Args:
      norm: whether weights of the chosen are normalised, where that is part of it.
    """
    meta.only("expert_gating_func", scoring)
    for key in ("expert_weights_scale", "expert_group_count"):
        meta.only(key, 0, 1)
    meta.only("expert_group_used_count", 0, 1)
    if norm is not None:
        meta.only("expert_weights_norm", norm)


def groups(meta: Metadata) -> dict:
    """Groups of experts; a file without them is computed without, as by llama.cpp."""
    return {
        "n_group": meta.get("expert_group_count") or 1,
        "topk_group": meta.get("expert_group_used_count") or 1,
    }


def router_v3(meta: Metadata) -> dict:
    """DeepSeek-V3's router: sigmoid, groups, normalised or not, scaled.

    Modules that predict later tokens are left out.
    """
    meta.only("expert_gating_func", SIGMOID)
    return groups(meta) | {
        "routed_scaling_factor": meta.get("expert_weights_scale") or 1.0,
        "norm_topk_prob": meta.get("expert_weights_norm", False),
    }


def shared_and_dense(meta: Metadata) -> dict:
    """How many experts wide the shared one is; dense layers come first."""
    return {
        "n_shared_experts": meta.need("expert_shared_count"),
        "first_k_dense_replace": meta.get("leading_dense_block_count", 0),
    }


def dense_layers(meta: Metadata) -> list[int]:
    """Layers without a router: dense ones."""
    return [i for i in range(meta.layers) if _ROUTER.format(i) not in meta.tensors]


def mlp_layer_types(meta: Metadata) -> list[str]:
    """The same, as a word for each layer."""
    dense = dense_layers(meta)
    return ["dense" if i in dense else "sparse" for i in range(meta.layers)]


def rope(
    meta: Metadata,
    *,
    log_multiplier: bool = False,
    truncate: bool | None = None,
    long_magnitude: float | None = None,
) -> dict:
    """How positions are rotated: not at all scaled, linear, YaRN or LongRoPE.

    Args:
      log_multiplier: whether the family has DeepSeek's `mscale`.
      truncate: of YaRN, which a file cannot say; None: the family has no such field.
      long_magnitude: of LongRoPE, the same.
    """
    found = {"rope_theta": meta.get("rope.freq_base", 10_000.0)}
    factor = meta.get("rope.scaling.factor", meta.get("rope.scale_linear"))
    kind = meta.get("rope.scaling.type")
    if kind is None:  # llama.cpp's default
        kind = "linear" if factor not in (None, 0, 1) else "none"
    original = meta.get("rope.scaling.original_context_length")
    log_mul = meta.get("rope.scaling.yarn_log_multiplier")
    betas = {
        name: meta.get("rope.scaling.yarn_" + name)
        for name in ("beta_fast", "beta_slow")
    }
    attention_factor = meta.get("rope.scaling.yarn_attn_factor")
    if long_magnitude is not None and _LONG_FACTORS[0] in meta.tensors:
        meta.get("rope.scaling.attn_factor")
        short, long = map(meta.weights, _LONG_FACTORS)
        magnitudes = dict.fromkeys(("short_mscale", "long_mscale"), long_magnitude)
        own = {"short_factor": short, "long_factor": long, _ORIGINAL: original}
        return found | magnitudes | own | {"rope_type": "longrope"}
    meta.only("rope.scaling.attn_factor", 1)
    if kind == "none":
        return found | {"rope_type": "default"}
    found |= {"rope_type": str(kind)[:60], "factor": factor}
    if kind != "yarn":
        return found  # linear, or refused by name
    meta.only("rope.scaling.yarn_ext_factor", 1, -1)
    found |= {_ORIGINAL: original} | betas
    if attention_factor is not None:
        found["attention_factor"] = attention_factor
    if log_mul:
        if not log_multiplier:
            raise meta.bad("rope.scaling.yarn_log_multiplier", log_mul, "none")
        if not isinstance(log_mul, float):
            raise meta.bad("rope.scaling.yarn_log_multiplier", log_mul, "a number")
        # A tenth of mscale_all_dim; llama.cpp, too, takes mscale to be the same.
        mscale = float(Decimal(repr(log_mul)) * 10)
        found |= {"mscale": mscale, "mscale_all_dim": mscale}
    if truncate is not None:
        found["truncate"] = truncate
    return {name: value for name, value in found.items() if value is not None}


def _with_factors(meta: Metadata, rope: dict) -> dict:
    """A rope whose single frequencies the file divides (Llama 3.1's and 4's).

    That is a LongRoPE whose original context is all of it. Factors of one need none.
    """
    factors = meta.weights(ROPE_FACTORS)
    if factors is None or all(factor == 1 for factor in factors):
        meta.needed.discard(ROPE_FACTORS)
        return rope
    if rope["rope_type"] != "default":
        raise meta.bad("rope.scaling.type", rope["rope_type"], "none besides factors")
    both = dict.fromkeys(("short_factor", "long_factor"), factors)
    own = {"attention_factor": 1.0, _ORIGINAL: meta.need("context_length")}
    return rope | both | own | {"rope_type": "longrope"}


def turning_share(meta: Metadata, width: int) -> float:
    """Of Gemma 4's full layers: the share of a head whose pairs turn, the first ones.

    llama.cpp divides the frequencies of all others by a number that stops them.
    """
    factors = meta.weights(ROPE_FACTORS) or []
    turning = factors.count(1)
    stopped = [factor for factor in factors[turning:] if factor > 1e20]
    if not turning or turning + len(stopped) != width // 2:
        raise meta.bad(
            "attention.key_length",
            width,
            f"{ROPE_FACTORS} of {width // 2} numbers, ones and then huge ones",
        )
    return share(2 * turning, width)

"""How a layer attends: heads, rotary positions, norms of queries and keys.

One description for every family, see `config.py`.
"""

import dataclasses
from typing import ClassVar

from moe_edge.core.checks import ConfigError, check_count, check_known
from moe_edge.model.quantised import BLOCK

ATTENTION_KINDS = ("gqa", "mla")
QK_NORMS = ("none", "head", "unit", "full")
CACHE_TYPES = ("float32", "bfloat16", "q8_0")  # of keys and values, see cache_types.py
ROPE_KINDS = ("default", "linear", "yarn", "llama3", "longrope", "proportional")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. `dim` is the rotated width of a head."""

    dim: int
    theta: float = 10_000.0
    kind: str = "default"
    interleaved: bool = False  # pairs (0,1),(2,3).. (DeepSeek, ERNIE), not halves
    factor: float = 1.0
    factors: tuple[float, ...] = ()  # longrope: divide the frequencies, one by one
    # proportional: pairs that turn, the first ones; others stand still
    turning: int = 0
    original_positions: int = 0  # yarn, llama3, longrope
    attention_factor: float = 1.0  # multiplies cos and sin (yarn, longrope)
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: round the correction range to whole indices
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Grouped-query or multi-head latent attention, of a layer or of all."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # width of q and k per head (MLA: nope_dim + rope.dim)
    rope: RopeConfig | None  # None: queries and keys do not know their positions
    kind: str = "gqa"
    softmax_scale: float | None = None  # None: head_dim ** -0.5
    qkv_bias: bool = False
    out_bias: bool = False
    # "head": per head; "unit": without weights; "full": over the whole projection.
    qk_norm: str = "none"
    qk_norm_after_rope: bool = False  # per head only (HunYuan)
    clip_qkv: float | None = None
    # q has twice its width: by head what is q, and whose sigmoid multiplies what the
    # head gives.
    output_gate: bool = False
    sinks: bool = False  # one learned logit per head in the softmax's denominator
    # Of every layer of the model, how many latest positions a query sees (None: all of
    # them). Kinds besides the first have none: see `ModelConfig.other_attention`.
    windows: tuple[int | None, ...] = ()
    chunked: bool = False  # a query sees its own chunk of `window` positions (Llama 4)
    v_head_dim: int = 0  # 0: head_dim (MLA states it always)
    value_scale: float = 1.0  # multiplies v
    v_norm: bool = False  # RMSNorm without weights of each head of v
    k_is_v: bool = False  # v is the product of k, before its norm and rotation
    # q of position p is multiplied by 1 + temperature * log(1 + (p + 1) // span)
    # (Llama 4, arXiv 2501.19399).
    temperature: float = 0.0
    temperature_span: int = 1
    # MLA only
    kv_lora_rank: int = 0
    q_lora_rank: int | None = None
    nope_dim: int = 0
    # RMSNorm epsilon inside MLA when it differs from the model's.
    lora_norm_eps: float | None = None
    # How keys and values are kept (`cache_types.py`). Of a run, not of a checkpoint.
    cache_type: str = "float32"

    has_state: ClassVar[bool] = False  # of `state_config`: other kinds of layers

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def value_dim(self) -> int:
        """Width of a head of v."""
        return self.v_head_dim or self.head_dim

    @property
    def cache_heads(self) -> int:
        """Rows of a layer's cache that belong to one row of the batch."""
        return 1 if self.kind == "mla" else self.num_kv_heads

    @property
    def cache_widths(self) -> dict[str, int]:
        """Name -> values of a position, of each array of a layer's cache."""
        if self.kind == "mla":
            rotated = 0 if self.rope is None else self.rope.dim
            return {"latent": self.kv_lora_rank + rotated}
        return {"k": self.head_dim, "v": self.value_dim}


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """What chooses the `top_k` positions that a token sees, where there are more.

    Nothing here runs it: contexts end at `top_k`, its weights stay in checkpoints.
    (DeepSeek-V3.2)
    """

    num_heads: int
    head_dim: int
    top_k: int
    layers: tuple[int, ...]  # those that have one


def check_attention(attention: AttentionConfig) -> None:
    """Raises ConfigError unless the fields of a kind of attention fit together."""
    check_known("attention kind", attention.kind, ATTENTION_KINDS)
    check_known("qk norm", attention.qk_norm, QK_NORMS)
    check_known("kv_cache", attention.cache_type, CACHE_TYPES)
    sizes = ("num_heads", "num_kv_heads", "head_dim", "value_dim", "temperature_span")
    for name in sizes:
        check_count(name, getattr(attention, name))
    if attention.num_heads % attention.num_kv_heads:
        raise ConfigError(
            f"num_heads {attention.num_heads} must be a multiple of num_kv_heads "
            f"{attention.num_kv_heads}"
        )
    if attention.qk_norm_after_rope and attention.qk_norm not in ("head", "unit"):
        raise ConfigError(
            "a norm of q and k after rotation is one per head, got qk_norm "
            f"{attention.qk_norm!r}"
        )
    gated = attention.output_gate
    if gated and (attention.qkv_bias or attention.value_dim != attention.head_dim):
        raise ConfigError(
            "an output gate, which stands with q, is as wide as v and has no bias; "
            f"got head_dim {attention.head_dim}, v_head_dim {attention.value_dim}, "
            f"qkv_bias {attention.qkv_bias}"
        )
    if attention.k_is_v and attention.value_dim != attention.head_dim:
        raise ConfigError(
            f"v that is k has its width {attention.head_dim}, got v_head_dim "
            f"{attention.v_head_dim}"
        )
    if attention.kind == "mla":
        _check_latent(attention)
    for name, width in attention.cache_widths.items():
        if attention.cache_type == "q8_0" and width % BLOCK:
            raise ConfigError(
                f"kv_cache q8_0 holds values in blocks of {BLOCK}, which do not fill a "
                f"{name} of width {width}; use bfloat16 or float32"
            )
    rope = attention.rope
    if rope is None:
        if attention.kind == "mla":
            raise ConfigError("attention kind mla needs a rope, got None")
        return
    check_known("rope kind", rope.kind, ROPE_KINDS)
    if rope.dim % 2 or rope.dim > attention.head_dim:
        raise ConfigError(
            f"rotary width {rope.dim} must be even and at most "
            f"head_dim {attention.head_dim}"
        )
    if len(rope.factors) != (rope.dim // 2 if rope.kind == "longrope" else 0):
        raise ConfigError(
            f"a rope of kind {rope.kind!r} that rotates {rope.dim} dimensions has "
            f"{len(rope.factors)} factors; longrope needs one for two dimensions, "
            "others none"
        )
    if rope.turning > rope.dim // 2 or (rope.kind == "proportional") != (
        rope.turning > 0
    ):
        raise ConfigError(
            f"a proportional rope turns 1..{rope.dim // 2} pairs, others state none; "
            f"got {rope.turning} of a rope {rope.kind}"
        )


def _check_latent(attention: AttentionConfig) -> None:
    """Raises ConfigError for parts that latent attention does not compute."""
    fields = {field.name: field.default for field in dataclasses.fields(attention)}
    for name in (
        "output_gate",
        "chunked",
        "value_scale",
        "v_norm",
        "k_is_v",
        "temperature",
    ):
        value = getattr(attention, name)
        if value != fields[name]:
            raise ConfigError(
                f"attention kind mla has no {name}, got {value}; expected "
                f"{fields[name]}"
            )

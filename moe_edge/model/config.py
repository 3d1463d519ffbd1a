"""One description of a decoder-only MoE transformer, for every family.

A family is a choice of parts (attention kind, rope variant, router rule, expert
arithmetic, shared expert), never a class of its own. `convert/families.py` fills
these fields from a Hugging Face `config.json`; nothing here reads files.
"""

import dataclasses
import math
from typing import Any

from moe_edge.core.checks import ConfigError, check_count, check_known
from moe_edge.model.attention_config import (
    AttentionConfig,
    IndexerConfig,
    RopeConfig,
    check_attention,
)
from moe_edge.model.state_config import StateConfig

SCORINGS = ("softmax", "sigmoid", "softmax_topk", "sparsemixer")
GROUP_SCORES = ("max", "top2")
ROUNDINGS = ("float32", "int8")  # of what few vectors are
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "clamped_swiglu")
NORMS = ("rms", "layer")
# How sub-experts are chosen: a router row each, or their parents' router and then
# their gate neurons (model/proxy_gate.py) or rows (model/calibrated_gate.py).
PROXY_GATES = ("proxy_pattern", "proxy_global")
GATES = ("linear", *PROXY_GATES, "calibrated")
# How a layer takes in earlier positions.
Mixer = AttentionConfig | StateConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Router, routed experts and shared expert of a MoE layer.

    In a refactored model (MoE-Prism) the experts are sub-experts: `num_experts`,
    `top_k` and `expert_dim` are theirs, and block `parent * sub_experts + sub` is the
    sub-th most important part of its parent.
    """

    num_experts: int
    top_k: int
    expert_dim: int
    scoring: str = "softmax"
    norm_topk: bool = False
    norm_epsilon: float = 1e-20  # added to the sum that weights are divided by
    # sparsemixer: half of how much lower, relative to its size, the logit of an expert
    # may be that shares the weight with a chosen one.
    nearness: float = 0.0
    routed_scaling: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_score: str = "max"
    correction_bias: bool = False  # added for the choice, not for the weight
    router_bias: bool = False
    expert_bias: bool = False
    # How records hold the experts: None in floats, or one of `quantised.KINDS`. No
    # config.json says it; the manifest of a quantised checkpoint of ours does.
    expert_kind: str | None = None
    activation: str = "silu"
    swiglu_limit: float | None = None  # clamped_swiglu: clip of gate and up
    # A token's score multiplies what its one expert takes, not what it gives (Llama 4).
    input_scaled: bool = False
    # Router, experts and shared expert (here a dense MLP beside them) take the state
    # before them normed without weights, each by weights of its own, and experts and
    # shared expert have a norm of their own behind them (Gemma 4).
    own_norms: bool = False
    expert_scale: bool = False  # a factor of each expert, after normalisation
    shared_dim: int = 0  # 0: no shared expert
    shared_gate: bool = False  # sigmoid gate on the shared expert's output
    sub_experts: int = 1  # U, blocks of a parent expert
    parent_top_k: int = 0  # parents that the router chose before the split
    gate: str = "linear"
    gate_neurons: int = 0  # r of each block; proxy gates
    # Experts that were pruned and whose rows stay in the softmax's denominator, where
    # weights are shares of it. No config.json says it; the manifest does.
    removed_experts: int = 0
    # proxy_pattern: [parent_top_k][U] mean share of the output, by rank of the parent
    # and of the block inside it.
    rank_shares: tuple[tuple[float, ...], ...] = ()

    @property
    def num_parents(self) -> int:
        """Experts before the split."""
        return self.num_experts // self.sub_experts

    @property
    def weighs_by_scores(self) -> bool:
        """Whether weights are the experts' scores times one factor a token."""
        further = self.expert_scale or self.input_scaled
        return not further and self.scoring != "sparsemixer"

    @property
    def has_proxy_gate(self) -> bool:
        return self.gate in PROXY_GATES

    @property
    def keeps_router(self) -> bool:
        """Whether the router is that of the parents, whose blocks are chosen then."""
        return self.gate != "linear"

    @property
    def max_top_k(self) -> int:
        """The largest K that the gate defines."""
        if self.keeps_router:
            return self.parent_top_k * self.sub_experts
        return self.num_experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A whole model. `dense_layers` have a plain MLP instead of experts.

    Where layers differ in more than their windows, `other_attention` holds the further
    kinds, layers with a state among them, and `attention_kinds` of every layer which it
    has (0: `attention`).
    """

    model_type: str
    vocab_size: int
    d_model: int
    num_layers: int
    attention: AttentionConfig
    moe: MoeConfig
    max_positions: int
    # Why that is less than config.json says, for messages.
    positions_end: str = ""
    norm_eps: float = 1e-6
    # Of layers and of the final state: root mean square, or LayerNorm with a bias.
    norm: str = "rms"
    # Norms multiply by one more than their weights, those of q and k, too.
    norm_plus_one: bool = False
    # Where attention and MLP are normed: what they take, what they give, or both.
    norm_before: bool = True
    norm_after: bool = False
    embed_scale: float = 1.0  # multiplies embeddings
    residual_scale: float = 1.0  # multiplies what attention and MLP add
    logit_divisor: float = 1.0
    head_bias: bool = False
    dense_layers: tuple[int, ...] = ()
    dense_dim: int = 0
    activation: str = "silu"  # of dense and shared MLPs
    tie_embeddings: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    other_attention: tuple[Mixer, ...] = ()
    attention_kinds: tuple[int, ...] = ()
    indexer: IndexerConfig | None = None
    logit_cap: float | None = None  # c tanh(logits / c)
    layer_scale: bool = False  # a factor of the residual stream behind each layer
    # What few vectors are when they meet interleaved blocks (`quantised.py`): exact, or
    # int8, rounded in blocks of 32. Of a run, not of a checkpoint.
    activations: str = "float32"
    hf_config: dict[str, Any] = dataclasses.field(
        default_factory=dict, compare=False, hash=False, repr=False
    )

    def __post_init__(self):
        attention, moe = self.attention, self.moe
        for kind, value, known in (
            ("router scoring", moe.scoring, SCORINGS),
            ("group score", moe.group_score, GROUP_SCORES),
            ("expert activation", moe.activation, ACTIVATIONS),
            ("activation", self.activation, ACTIVATIONS),
            ("activations", self.activations, ROUNDINGS),
            ("gate", moe.gate, GATES),
            ("norm", self.norm, NORMS),
        ):
            check_known(kind, value, known)
        sizes = {
            "vocab_size": self.vocab_size,
            "d_model": self.d_model,
            "num_layers": self.num_layers,
            "num_experts": moe.num_experts,
            "expert_dim": moe.expert_dim,
            "max_positions": self.max_positions,
        }
        for name, value in sizes.items():
            check_count(name, value)
        check_attention(attention)
        for each in self.other_attention:
            if isinstance(each, AttentionConfig):
                check_attention(each)
        self._check_kinds()
        if self.layer_scale and self.dense_layers:
            raise ConfigError(
                "a layer_scale is implemented for layers with experts, got dense "
                f"layers {self.dense_layers}"
            )
        if moe.own_norms and not (
            self.norm_before and self.norm_after and self.norm == "rms"
        ):
            raise ConfigError("own_norms of a MoE layer need RMSNorms on both sides")
        if not 1 <= moe.top_k <= moe.max_top_k:
            limit = "parent_top_k x sub_experts" if moe.keeps_router else "num_experts"
            raise ConfigError(
                f"top_k must be in 1..{limit}={moe.max_top_k}, got {moe.top_k}"
            )
        _check_split(moe)
        if moe.input_scaled and moe.top_k != 1:
            raise ConfigError(
                "experts whose input is scaled compute one a token: another scale for "
                f"each of several is not implemented, got top_k {moe.top_k}; use 1"
            )
        if (
            moe.num_parents % moe.num_groups
            or not 1 <= moe.topk_groups <= moe.num_groups
        ):
            raise ConfigError(
                f"num_groups {moe.num_groups} must divide num_experts "
                f"{moe.num_parents}, and topk_groups {moe.topk_groups} lie in "
                f"1..{moe.num_groups}"
            )
        if moe.topk_groups * (moe.num_experts // moe.num_groups) < moe.top_k:
            raise ConfigError(
                f"top_k {moe.top_k} exceeds the {moe.topk_groups} chosen groups of "
                f"{moe.num_experts // moe.num_groups} experts"
            )
        if attention.windows and len(attention.windows) != self.num_layers:
            raise ConfigError(
                f"attention windows name {len(attention.windows)} layers, the model "
                f"has {self.num_layers}"
            )
        if self.indexer is not None and self.max_positions > self.indexer.top_k:
            raise ConfigError(
                f"max_positions {self.max_positions} exceeds the {self.indexer.top_k} "
                "positions up to which attention is full without its indexer"
            )
        if not (self.norm_before or self.norm_after):
            raise ConfigError(
                "a layer needs norms before or after attention and MLP, got neither"
            )
        if self.dense_layers and not self.dense_dim:
            raise ConfigError("dense layers need dense_dim > 0")
        if any(not 0 <= layer < self.num_layers for layer in self.dense_layers):
            raise ConfigError(
                f"dense layers {self.dense_layers} must lie in 0..{self.num_layers - 1}"
            )

    def _check_kinds(self) -> None:
        """Raises ConfigError unless every layer has one of the kinds of attention."""
        kinds, others = self.attention_kinds, self.other_attention
        if bool(kinds) != bool(others) or any(each.windows for each in others):
            raise ConfigError(
                "attention_kinds name the kind of every layer where there are "
                "other_attention, whose windows stand in attention"
            )
        found = sorted(set(kinds))
        if kinds and (
            len(kinds) != self.num_layers or found != list(range(len(others) + 1))
        ):
            raise ConfigError(
                f"attention_kinds name {len(kinds)} layers and kinds {found}, expected "
                f"{self.num_layers} layers and kinds 0..{len(others)}"
            )

    @property
    def attentions(self) -> tuple[Mixer, ...]:
        """All kinds of attention that layers have, and of layers with a state."""
        return (self.attention, *self.other_attention)

    def attention_of(self, layer: int) -> Mixer:
        """The attention of a layer, or its state; its window: `window`."""
        kind = self.attention_kinds[layer] if self.attention_kinds else 0
        return self.attentions[kind]

    @property
    def cache_type(self) -> str:
        """How keys and values are kept, see `with_cache`."""
        return self.attention.cache_type

    def with_cache(self, kind: str) -> "ModelConfig":
        """The same model with keys and values of this type of `cache_types.py`.

        Raises:
          ConfigError: an unknown type, or one whose blocks do not fill a head.
        """
        if kind == self.cache_type:
            return self
        first, *others = (
            each if each.has_state else dataclasses.replace(each, cache_type=kind)
            for each in self.attentions
        )
        return dataclasses.replace(self, attention=first, other_attention=tuple(others))

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a state a row: see `state_config`."""
        return any(each.has_state for each in self.attentions)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The different rotary embeddings of the layers."""
        ropes = (each.rope for each in self.attentions)
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    def like(self, layer: int) -> int:
        """The first layer of the same kind: one program serves both."""
        is_dense = layer in self.dense_layers
        alike = (
            other
            for other in range(layer)
            if (other in self.dense_layers) == is_dense
            and self.attention_of(other) is self.attention_of(layer)
        )
        return next(alike, layer)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Ids of the layers that have routed experts."""
        return tuple(i for i in range(self.num_layers) if i not in self.dense_layers)

    @property
    def context_words(self) -> str:
        """How many positions there are, and why there are no more."""
        why = f" ({self.positions_end})" if self.positions_end else ""
        return f"{self.max_positions}{why}"

    def window(self, layer: int) -> int | None:
        """How many latest positions a query of `layer` sees (None: all)."""
        return self.attention.windows[layer] if self.attention.windows else None


def _check_split(moe: MoeConfig) -> None:
    """Raises ConfigError unless the fields of a refactored model fit together."""
    U, shares = moe.sub_experts, moe.rank_shares
    if U < 1 or moe.num_experts % U:
        raise ConfigError(
            f"sub_experts must divide num_experts {moe.num_experts}, got {U}"
        )
    if U > 1 and not 1 <= moe.parent_top_k <= moe.num_parents:
        raise ConfigError(
            f"parent_top_k must be in 1..{moe.num_parents}, got {moe.parent_top_k}"
        )
    if moe.keeps_router and (moe.own_norms or moe.expert_scale):
        raise ConfigError(
            f"a {moe.gate} gate judges blocks by what the router takes, which experts "
            "with norms or factors of their own do not take; use a linear gate"
        )
    if not moe.has_proxy_gate:
        if moe.gate_neurons or shares:
            raise ConfigError("gate_neurons and rank_shares need a proxy gate")
        return
    is_count = type(moe.gate_neurons) is int
    if not (is_count and 1 <= moe.gate_neurons <= moe.expert_dim):
        raise ConfigError(
            f"gate_neurons must be in 1..{moe.expert_dim} (the neurons of a "
            f"sub-expert), got {moe.gate_neurons}"
        )
    expected = (moe.parent_top_k, U) if moe.gate == "proxy_pattern" else (0, 0)
    found = (len(shares), len(shares[0]) if shares else 0)
    if found != expected or any(len(row) != expected[1] for row in shares):
        raise ConfigError(
            f"rank_shares of a {moe.gate} gate must be {expected[0]} rows of "
            f"{expected[1]} numbers, got {found}"
        )
    if not all(math.isfinite(share) and share >= 0 for row in shares for share in row):
        raise ConfigError("rank_shares must be finite numbers of at least 0")

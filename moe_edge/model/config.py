"""One description of a decoder-only MoE transformer, for every family.

A family is a choice of parts (attention kind, rope variant, router rule, expert
arithmetic, shared expert), never a class of its own. `convert/families.py` fills
these fields from a Hugging Face `config.json`; nothing here reads files.
"""

import dataclasses
from typing import Any

from moe_edge.model.attention_config import AttentionConfig, IndexerConfig, RopeConfig
from moe_edge.model.config_checks import PROXY_GATES, check_config
from moe_edge.model.state_config import StateConfig

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
        check_config(self)

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

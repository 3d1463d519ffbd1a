"""Names and shapes of a layer's dense weights: what modules hold and checkpoints store.

Routed experts are apart: see `record.py`.
"""

from moe_edge.model.attention_config import AttentionConfig
from moe_edge.model.config import Mixer, ModelConfig

Shapes = dict[str, tuple[int, ...]]
# Matrices that vectors are multiplied by, and that may be in blocks (`quantised.py`).
_PRODUCTS = (
    *("attn.q", "attn.k", "attn.v", "attn.o", "attn.q_a", "attn.q_b", "attn.kv_a"),
    *("attn.in_proj", "attn.in_qkvz", "attn.in_qkv", "attn.in_z", "attn.out_proj"),
    *("mlp.gate", "mlp.up", "mlp.down", "shared.gate", "shared.up", "shared.down"),
    "head",
)


def may_be_blocks(name: str, shape: tuple[int, ...], width: int) -> bool:
    """Whether a dense weight may be held in blocks of `width` weights.

    Not routers, nor what gives a delta-net's rates and decays, both small; nor MLA's
    `kv_b`, which is no factor of a product but part of it.
    """
    known = name in _PRODUCTS or name == "embed"
    return known and len(shape) == 2 and shape[1] % width == 0


def layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Everything of a layer but its routed experts, by canonical name."""
    D, moe = config.d_model, config.moe
    shapes = block_shapes(config, layer)
    parts = {"attn": attention_shapes(config.attention_of(layer), D)}
    if layer in config.dense_layers:
        parts["mlp"] = mlp_shapes(D, config.dense_dim)
    else:
        parts["router"] = router_shapes(config)
        if moe.shared_dim:
            parts["shared"] = mlp_shapes(D, moe.shared_dim)
    for part, own in parts.items():
        shapes |= {f"{part}.{name}": shape for name, shape in own.items()}
    if "router" in parts and moe.shared_gate:
        shapes["shared_gate"] = (1, D)
    return shapes


def kept_shapes(config: ModelConfig, layer: int) -> Shapes:
    """What checkpoints store of a layer although no module holds it."""
    indexer, D = config.indexer, config.d_model
    if indexer is None or layer not in indexer.layers:
        return {}
    width = indexer.head_dim
    q_rank = config.attention_of(layer).q_lora_rank
    return {
        "indexer.q": (indexer.num_heads * width, q_rank),
        "indexer.k": (width, D),
        "indexer.k_norm": (width,),
        "indexer.k_norm_bias": (width,),
        "indexer.weights": (indexer.num_heads, D),
    }


def block_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Vectors of a layer: norms of what attention and MLP take, and of what they give;
    with experts' own norms `mlp_norm` is the shared expert's. Its factor.
    """
    names = ["attn_norm", "mlp_norm"] if config.norm_before else []
    names += ["attn_after_norm", "mlp_after_norm"] if config.norm_after else []
    if config.moe.own_norms and layer not in config.dense_layers:
        names += ["expert_norm", "expert_after_norm", "shared_after_norm"]
    shapes = norm_shapes(config, *names)
    return shapes | ({"layer_scale": (1,)} if config.layer_scale else {})


def norm_shapes(config: ModelConfig, *names: str) -> Shapes:
    """Weights of norms, and the biases that LayerNorm has."""
    endings = ("", "_bias") if config.norm == "layer" else ("",)
    return {name + ending: (config.d_model,) for ending in endings for name in names}


def mlp_shapes(d_model: int, dim: int) -> Shapes:
    """A gated MLP."""
    up = (dim, d_model)
    return {"gate": up, "up": up, "down": (d_model, dim)}


def router_shapes(config: ModelConfig) -> Shapes:
    """The router; where it chooses parents, what chooses among their blocks follows."""
    moe, D = config.moe, config.d_model
    E = moe.num_parents if moe.keeps_router else moe.num_experts
    shapes: Shapes = {"weight": (E, D)}
    if moe.router_bias:
        shapes["bias"] = (E,)
    if moe.correction_bias:
        shapes["correction_bias"] = (E,)
    if moe.removed_experts:
        shapes["removed_weight"] = (moe.removed_experts, D)
        if moe.router_bias:
            shapes["removed_bias"] = (moe.removed_experts,)
    if moe.own_norms:
        shapes["input_scale"] = (D,)
    if moe.expert_scale:
        shapes["expert_scale"] = (E,)
    if moe.has_proxy_gate:
        neurons = moe.num_experts * moe.gate_neurons
        shapes |= {"proxy_gate": (neurons, D), "proxy_up": (neurons, D)}
        shapes |= {"proxy_scale": (neurons,), "proxy_prior": (moe.num_experts,)}
        if moe.expert_bias:
            shapes |= {"proxy_gate_bias": (neurons,), "proxy_up_bias": (neurons,)}
    if moe.gate == "calibrated":
        blocks = moe.num_experts
        shapes |= {"level_weight": (blocks, D), "level_bias": (blocks,)}
    return shapes


def attention_shapes(attention: Mixer, d_model: int) -> Shapes:
    """Attention of either kind, or a layer with a state."""
    if attention.has_state:
        return attention.weight_shapes(d_model)
    D, H, P = d_model, attention.num_heads, attention.head_dim
    if attention.kind == "mla":
        return _mla_shapes(attention, D)
    q, kv = H * P, attention.num_kv_heads * P
    values = attention.num_kv_heads * attention.value_dim
    products = 2 * q if attention.output_gate else q
    shapes: Shapes = {"q": (products, D), "k": (kv, D), "v": (values, D)}
    shapes["o"] = (D, H * attention.value_dim)
    if attention.k_is_v:
        del shapes["v"]
    if attention.qkv_bias:
        shapes |= {"q_bias": (q,), "k_bias": (kv,)}
        shapes |= {} if attention.k_is_v else {"v_bias": (values,)}
    if attention.out_bias:
        shapes["o_bias"] = (D,)
    if attention.qk_norm == "head":
        shapes |= {"q_norm": (P,), "k_norm": (P,)}
    if attention.qk_norm == "full":
        shapes |= {"q_norm": (q,), "k_norm": (kv,)}
    if attention.sinks:
        shapes["sinks"] = (H,)
    return shapes


def _mla_shapes(attention: AttentionConfig, D: int) -> Shapes:
    H = attention.num_heads
    rank, q_rank = attention.kv_lora_rank, attention.q_lora_rank
    q, values = H * attention.head_dim, H * attention.v_head_dim
    shapes: Shapes = {"q": (q, D)}
    if q_rank is not None:
        shapes = {"q_a": (q_rank, D), "q_a_norm": (q_rank,), "q_b": (q, q_rank)}
    return shapes | {
        "kv_a": (rank + attention.rope.dim, D),
        "kv_a_norm": (rank,),
        "kv_b": (H * attention.nope_dim + values, rank),
        "o": (D, values),
    }

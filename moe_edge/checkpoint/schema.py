"""Which dense tensors a model has, by canonical name, and their shapes.

One place that both checkpoint formats are checked against: a tensor is missing,
extra or of the wrong shape exactly when it disagrees with these tables.
"""

from moe_edge.core.checks import CheckpointError
from moe_edge.model.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


# What is stored and read together: a layer's dense tensors by its id, or a name.
# The head is apart from the rest of the top because both can be very large.
Item = int | str
TOP_ITEMS = ("top", "head")


def dense_items(config: ModelConfig) -> list[Item]:
    """Every item of a model, in the order of the forward pass but the head."""
    tops = TOP_ITEMS[:1] if config.tie_embeddings else TOP_ITEMS
    return [*tops, *range(config.num_layers)]


def item_shapes(config: ModelConfig, item: Item) -> Shapes:
    """Canonical name -> shape of the dense tensors of one item."""
    V, D = config.vocab_size, config.d_model
    if item == "top":
        return {"embed": (V, D), "final_norm": (D,)}
    if item == "head":
        return {"head": (V, D)}
    return layer_shapes(config, int(item))


def layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Everything of a layer but its routed experts."""
    D = config.d_model
    shapes: Shapes = {"attn_norm": (D,), "mlp_norm": (D,)}
    shapes |= _mla_shapes(config) if config.attention.kind == "mla" else _gqa(config)
    if layer in config.dense_layers:
        F = config.dense_dim
        return shapes | {"mlp.gate": (F, D), "mlp.up": (F, D), "mlp.down": (D, F)}
    moe = config.moe
    E = moe.num_parents if moe.has_proxy_gate else moe.num_experts
    shapes["router.weight"] = (E, D)
    if moe.router_bias:
        shapes["router.bias"] = (E,)
    if moe.correction_bias:
        shapes["router.correction_bias"] = (E,)
    if moe.has_proxy_gate:
        neurons = moe.num_experts * moe.gate_neurons
        shapes |= {"router.proxy_gate": (neurons, D), "router.proxy_up": (neurons, D)}
        shapes["router.proxy_scale"] = (neurons,)
        shapes["router.proxy_prior"] = (moe.num_experts,)
        if moe.expert_bias:
            shapes["router.proxy_gate_bias"] = (neurons,)
            shapes["router.proxy_up_bias"] = (neurons,)
    if moe.shared_dim:
        F = moe.shared_dim
        shapes |= {"shared.gate": (F, D), "shared.up": (F, D), "shared.down": (D, F)}
    if moe.shared_gate:
        shapes["shared_gate"] = (1, D)
    return shapes


def _gqa(config: ModelConfig) -> Shapes:
    attention, D = config.attention, config.d_model
    P = attention.head_dim
    q, kv = attention.num_heads * P, attention.num_kv_heads * P
    shapes: Shapes = {
        "attn.q": (q, D),
        "attn.k": (kv, D),
        "attn.v": (kv, D),
        "attn.o": (D, q),
    }
    if attention.qkv_bias:
        shapes |= {"attn.q_bias": (q,), "attn.k_bias": (kv,), "attn.v_bias": (kv,)}
    if attention.out_bias:
        shapes["attn.o_bias"] = (D,)
    if attention.qk_norm == "head":
        shapes |= {"attn.q_norm": (P,), "attn.k_norm": (P,)}
    if attention.qk_norm == "full":
        shapes |= {"attn.q_norm": (q,), "attn.k_norm": (kv,)}
    if attention.sinks:
        shapes["attn.sinks"] = (attention.num_heads,)
    return shapes


def _mla_shapes(config: ModelConfig) -> Shapes:
    attention, D = config.attention, config.d_model
    H, rank, q_rank = attention.num_heads, attention.kv_lora_rank, attention.q_lora_rank
    q = H * attention.head_dim
    shapes: Shapes = {
        "attn.kv_a": (rank + attention.rope.dim, D),
        "attn.kv_a_norm": (rank,),
        "attn.kv_b": (H * (attention.nope_dim + attention.v_head_dim), rank),
        "attn.o": (D, H * attention.v_head_dim),
    }
    if q_rank is None:
        return shapes | {"attn.q": (q, D)}
    return shapes | {
        "attn.q_a": (q_rank, D),
        "attn.q_a_norm": (q_rank,),
        "attn.q_b": (q, q_rank),
    }


def name_some(names, limit: int = 8) -> str:
    """Up to `limit` names and how many more there are."""
    names = list(names)
    shown = ", ".join(names[:limit])
    return (
        shown if len(names) <= limit else f"{shown} ... and {len(names) - limit} more"
    )


def check_tensors(where: str, found: Shapes, expected: Shapes) -> None:
    """Compares names and shapes, both ways.

    Args:
      where: what is being read, for the message.
      found: name -> shape in the file.
      expected: name -> shape that the config asks for.
    Raises:
      CheckpointError: names the missing and unexpected tensors, or the first few of
        wrong shape.
    """
    problems = []
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    if missing:
        problems.append(f"missing {name_some(missing)}")
    if extra:
        problems.append(f"unexpected {name_some(extra)}")
    wrong = [
        f"{name} has shape {tuple(found[name])}, expected {tuple(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    if wrong:
        problems.append(name_some(wrong))
    if problems:
        raise CheckpointError(
            f"{where} does not fit its config: {'; '.join(problems)}; use the files "
            "that belong to this config"
        )

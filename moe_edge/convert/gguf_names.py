"""Names: canonical parameter name <-> GGUF tensor name, and what llama.cpp changed.

llama.cpp's converter stacks the experts of a layer, `[E, out, in]`, on demand with gate
and up in one tensor; permutes the rows of q and k of llama files for its own rope, or
joins q, k and v on demand; cuts DeepSeek's kv_b into k_b (transposed) and v_b (in files
from 2025 on); and drops axes of length one in front. Names that differ by architecture
stand in `gguf_families.py`.
Source: the folder `conversion` and gguf-py/gguf/constants.py of github.com/ggml-org.
"""

from typing import NamedTuple

import numpy as np

from moe_edge.checkpoint.schema import Item, Shapes, dense_items, item_shapes
from moe_edge.convert import gguf_states
from moe_edge.convert.gguf_families import Architecture
from moe_edge.convert.gguf_parts import ROPE_FACTORS
from moe_edge.model.config import ModelConfig
from moe_edge.model.record import RecordLayout

TOP = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "final_norm_bias": "output_norm.bias",
    "head_bias": "output.bias",
}
_LAYER = {
    "attn_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "attn_norm_bias": "attn_norm.bias",
    "mlp_norm_bias": "ffn_norm.bias",
    "attn.q": "attn_q.weight",
    "attn.k": "attn_k.weight",
    "attn.v": "attn_v.weight",
    "attn.o": "attn_output.weight",
    "attn.q_bias": "attn_q.bias",
    "attn.k_bias": "attn_k.bias",
    "attn.v_bias": "attn_v.bias",
    "attn.o_bias": "attn_output.bias",
    "attn.q_norm": "attn_q_norm.weight",
    "attn.k_norm": "attn_k_norm.weight",
    "attn.sinks": "attn_sinks.weight",
    "attn.q_a": "attn_q_a.weight",
    "attn.q_a_norm": "attn_q_a_norm.weight",
    "attn.q_b": "attn_q_b.weight",
    "attn.kv_a": "attn_kv_a_mqa.weight",
    "attn.kv_a_norm": "attn_kv_a_norm.weight",
    "attn.kv_b": "attn_kv_b.weight",
    "indexer.q": "indexer.attn_q_b.weight",
    "indexer.k": "indexer.attn_k.weight",
    "indexer.k_norm": "indexer.k_norm.weight",
    "indexer.k_norm_bias": "indexer.k_norm.bias",
    "indexer.weights": "indexer.proj.weight",
    "router.weight": "ffn_gate_inp.weight",
    "router.bias": "ffn_gate_inp.bias",
    "router.correction_bias": "exp_probs_b.bias",
    "shared.gate": "ffn_gate_shexp.weight",
    "shared.up": "ffn_up_shexp.weight",
    "shared.down": "ffn_down_shexp.weight",
    "shared_gate": "ffn_gate_inp_shexp.weight",
    "mlp.gate": "ffn_gate.weight",
    "mlp.up": "ffn_up.weight",
    "mlp.down": "ffn_down.weight",
}
_EXPERTS = {
    "gate": "ffn_gate_exps.weight",
    "up": "ffn_up_exps.weight",
    "down": "ffn_down_exps.weight",
    "gate_bias": "ffn_gate_exps.bias",
    "up_bias": "ffn_up_exps.bias",
    "down_bias": "ffn_down_exps.bias",
}
_GATE_UP = "ffn_gate_up_exps.weight"
_QKV = {
    "attn_qkv.weight": ("attn.q", "attn.k", "attn.v"),
    "attn_qkv.bias": ("attn.q_bias", "attn.k_bias", "attn.v_bias"),
}
_SPLIT = ("attn_k_b.weight", "attn_v_b.weight")
_PERMUTED = ("attn.q", "attn.k", "attn.q_bias", "attn.k_bias")
FREQUENCIES = ".attn_rot_embd.weight"


class Source(NamedTuple):
    """Rows of a tensor that make a dense parameter, or a part of one."""

    name: str
    whole: tuple[int, ...]  # the tensor's shape
    first: int  # row
    shape: tuple[int, ...]


class Stacked(NamedTuple):
    """A tensor [E, ...] of a layer's experts, of which each has `pieces` in it."""

    name: str
    pieces: int = 1
    piece: int = 0


def layer_prefix(layer: int) -> str:
    return f"blk.{layer}."


def dense_sources(
    config: ModelConfig, entry: Architecture, item: Item, found
) -> dict[str, list[Source]]:
    """Canonical name -> what it is made of, of one item.

    Args:
      found: names in the file; they tell what was cut or joined.
    """
    shapes = item_shapes(config, item)
    if isinstance(item, str):
        own = {n: t for n, t in entry.tensors.items() if n in TOP and t in found}
        top = TOP | own
        return {n: [Source(top[n], shape, 0, shape)] for n, shape in shapes.items()}
    table, prefix = _LAYER | entry.tensors, layer_prefix(item)
    sources = {
        name: [Source(prefix + table[name], shape, 0, shape)]
        for name, shape in shapes.items()
    }
    for joined, names in _QKV.items():
        if prefix + joined not in found or any(n not in shapes for n in names):
            continue
        own = [shapes[name] for name in names]
        whole = (sum(shape[0] for shape in own), *own[0][1:])
        first = 0
        for name, shape in zip(names, own, strict=True):
            sources[name] = [Source(prefix + joined, whole, first, shape)]
            first += shape[0]
    if "attn.conv" in shapes:  # without the axis of length one
        D, _, L = shapes["attn.conv"]
        name = prefix + table["attn.conv"]
        sources["attn.conv"] = [Source(name, (D, L), 0, (D, L))]
    if "attn.in_qkvz" in shapes:
        rows, D = shapes["attn.in_qkvz"]
        z = shapes["attn.out_proj"][1]
        sources["attn.in_qkvz"] = [
            Source(prefix + name, shape, 0, shape)
            for name, shape in (
                (table["attn.in_qkvz"], (rows - z, D)),
                (gguf_states.GATE, (z, D)),
            )
        ]
    if "attn.kv_b" in shapes and sources["attn.kv_b"][0].name not in found:
        a = config.attention
        cut = (
            (a.num_heads, a.kv_lora_rank, a.nope_dim),
            (a.num_heads, a.v_head_dim, a.kv_lora_rank),
        )
        sources["attn.kv_b"] = [
            Source(prefix + part, shape, 0, shape)
            for part, shape in zip(_SPLIT, cut, strict=True)
        ]
    return sources


def expert_names(config: ModelConfig, layer: int, found) -> dict[str, Stacked]:
    """Record part -> where it stands.

    Args:
      found: names in the file; they tell whether gate and up are one tensor.
    """
    prefix = layer_prefix(layer)
    names = {p: Stacked(prefix + _EXPERTS[p]) for p in RecordLayout.of(config).shapes}
    if prefix + _GATE_UP in found:
        for piece, part in enumerate(("gate", "up")):
            names[part] = Stacked(prefix + _GATE_UP, 2, piece)
    return names


def all_shapes(config: ModelConfig, entry: Architecture, found) -> Shapes:
    """Name -> shape of every tensor that the model needs."""
    shapes: Shapes = {}
    parts = RecordLayout.of(config).shapes
    for item in dense_items(config):
        for sources in dense_sources(config, entry, item, found).values():
            shapes |= {source.name: source.whole for source in sources}
        if item in config.moe_layers:
            for part, stacked in expert_names(config, item, found).items():
                rows, *rest = parts[part]
                shape = (config.moe.num_experts, stacked.pieces * rows, *rest)
                shapes[stacked.name] = shape
    return shapes


def squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without axes of length one in front, which files may leave out."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return tuple(shape)


def restore(
    config: ModelConfig, entry: Architecture, name: str, arrays: list[np.ndarray]
) -> np.ndarray:
    """A dense parameter as Hugging Face stores it, from its parts in the file."""
    if config.has_states:
        return gguf_states.restored(config, name, arrays)
    if len(arrays) == 2:
        k_HRN, v_HVR = arrays
        kv_b = np.concatenate([k_HRN.transpose(0, 2, 1), v_HVR], axis=1)
        return kv_b.reshape(-1, kv_b.shape[-1])
    (array,) = arrays
    if entry.permuted and name in _PERMUTED:
        a = config.attention
        heads = a.num_heads if name.startswith("attn.q") else a.num_kv_heads
        # Rows of a head: pairs (i, i + half) became neighbours.
        pairs = array.reshape(heads, -1, 2, *array.shape[1:])
        array = pairs.swapaxes(1, 2).reshape(array.shape)
    return array


def is_unused(name: str, num_layers: int, found) -> bool:
    """Whether a tensor belongs to nothing that the model computes.

    Args:
      found: names in the file.
    """
    # Checked by the reader, or by gguf_parts.py, which needs the one then.
    if name == ROPE_FACTORS or name.endswith(FREQUENCIES):
        return True
    prefix, _, rest = name.partition(".")
    layer = rest.split(".")[0]
    if prefix != "blk" or not layer.isdecimal() or len(layer) > 8:
        return False
    # Multi-token prediction modules are layers behind the last one.
    return int(layer) >= num_layers and f"blk.{layer}.nextn.eh_proj.weight" in found

"""Names: canonical parameter name <-> GGUF tensor name, and what llama.cpp changed.

llama.cpp's converter stacks the experts of a layer, `[E, out, in]`; permutes the rows
of q and k of llama files for its own rope; cuts DeepSeek's kv_b into k_b (transposed)
and v_b (in files from 2025 on); and drops axes of length one in front.
Source: convert_hf_to_gguf.py and gguf-py/gguf/constants.py of github.com/ggml-org.
"""

from typing import NamedTuple

import numpy as np

from moe_edge.checkpoint.schema import Item, Shapes, dense_items, item_shapes
from moe_edge.model.config import ModelConfig
from moe_edge.model.record import RecordLayout

# llama.cpp's name of an architecture -> model_type; deepseek2 is V2 or V3.
FAMILIES = {
    "olmoe": "olmoe",
    "llama": "mixtral",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "deepseek2": "deepseek_v2",
    "gpt-oss": "gpt_oss",
}
TOP = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
}
_LAYER = {
    "attn_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
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
_LAYER_OF_FAMILY = {"gpt_oss": {"mlp_norm": "post_attention_norm.weight"}}
_EXPERTS = {
    "gate": "ffn_gate_exps.weight",
    "up": "ffn_up_exps.weight",
    "down": "ffn_down_exps.weight",
    "gate_bias": "ffn_gate_exps.bias",
    "up_bias": "ffn_up_exps.bias",
    "down_bias": "ffn_down_exps.bias",
}
_SPLIT = ("attn_k_b.weight", "attn_v_b.weight")
_PERMUTED = ("attn.q", "attn.k", "attn.q_bias", "attn.k_bias")
ROPE_FACTORS = "rope_freqs.weight"
FREQUENCIES = ".attn_rot_embd.weight"


class Names(NamedTuple):
    """The tensors that make one dense parameter, and how."""

    parts: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


def layer_prefix(layer: int) -> str:
    return f"blk.{layer}."


def dense_names(config: ModelConfig, item: Item, found) -> dict[str, Names]:
    """Canonical name -> tensors of one item.

    Args:
      found: names in the file; they tell whether kv_b was cut.
    """
    table = _LAYER | _LAYER_OF_FAMILY.get(config.model_type, {})
    names = {}
    for name, shape in item_shapes(config, item).items():
        if isinstance(item, str):
            names[name] = Names((TOP[name],), (shape,))
            continue
        prefix = layer_prefix(item)
        parts, shapes = (prefix + table[name],), (shape,)
        if name == "attn.kv_b" and parts[0] not in found:
            a = config.attention
            parts = tuple(prefix + part for part in _SPLIT)
            shapes = (
                (a.num_heads, a.kv_lora_rank, a.nope_dim),
                (a.num_heads, a.v_head_dim, a.kv_lora_rank),
            )
        names[name] = Names(parts, shapes)
    return names


def expert_names(config: ModelConfig, layer: int) -> dict[str, str]:
    """Record part -> name of the stacked tensor [E, ...]."""
    parts = RecordLayout.of(config).shapes
    return {part: layer_prefix(layer) + _EXPERTS[part] for part in parts}


def all_shapes(config: ModelConfig, found) -> Shapes:
    """Name -> shape of every tensor that the model needs."""
    shapes: Shapes = {}
    parts = RecordLayout.of(config).shapes
    for item in dense_items(config):
        for names in dense_names(config, item, found).values():
            shapes |= dict(zip(names.parts, names.shapes, strict=True))
        if item in config.moe_layers:
            for part, name in expert_names(config, item).items():
                shapes[name] = (config.moe.num_experts, *parts[part])
    return shapes


def squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without axes of length one in front, which files may leave out."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return tuple(shape)


def restore(config: ModelConfig, name: str, arrays: list[np.ndarray]) -> np.ndarray:
    """A dense parameter as Hugging Face stores it, from its tensors in the file."""
    if len(arrays) == 2:
        k_HRN, v_HVR = arrays
        kv_b = np.concatenate([k_HRN.transpose(0, 2, 1), v_HVR], axis=1)
        return kv_b.reshape(-1, kv_b.shape[-1])
    (array,) = arrays
    if config.model_type == "mixtral" and name in _PERMUTED:
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
    # The one is checked by gguf_config.py, the others by the reader.
    if name == ROPE_FACTORS or name.endswith(FREQUENCIES):
        return True
    prefix, _, rest = name.partition(".")
    layer = rest.split(".")[0]
    if prefix != "blk" or not layer.isdecimal() or len(layer) > 8:
        return False
    # Multi-token prediction modules are layers behind the last one.
    return int(layer) >= num_layers and f"blk.{layer}.nextn.eh_proj.weight" in found

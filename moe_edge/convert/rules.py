"""Names: canonical parameter name <-> Hugging Face tensor name.

Here stands what most families share; where one differs, its `Family` says so.

The table is used in both directions, so a round trip cannot lose a tensor. Dense
names map one to one, but for a gate and an up projection in one tensor. Routed experts
stand in one tensor per expert and matrix, or fused per layer. gpt-oss is published
fused: `gate_up_proj [E, D, 2F]` with gate and up interleaved, `down_proj [E, F, D]`,
and their biases. Granite is, and all others are where transformers 5 saves its own
layout, in halves: `gate_up_proj [E, 2F, D]` (gate, then up) and `down_proj [E, D, F]`.
The shapes can be equal, so the family alone tells which it is.
Source: transformers 5.24, conversion_mapping.py and the families' modeling files.
"""

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from moe_edge.checkpoint.schema import Item, Shapes, dense_items, item_shapes
from moe_edge.convert.families import FAMILIES
from moe_edge.convert.family import Family, mlp_names
from moe_edge.model.config import ModelConfig
from moe_edge.model.record import RecordLayout

TOP = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "final_norm_bias": "model.norm.bias",
    "head": "lm_head.weight",
    "head_bias": "lm_head.bias",
}
_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "attn_norm_bias": "input_layernorm.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "mlp_norm_bias": "post_attention_layernorm.bias",
    "attn.q": "self_attn.q_proj.weight",
    "attn.k": "self_attn.k_proj.weight",
    "attn.v": "self_attn.v_proj.weight",
    "attn.o": "self_attn.o_proj.weight",
    "attn.q_bias": "self_attn.q_proj.bias",
    "attn.k_bias": "self_attn.k_proj.bias",
    "attn.v_bias": "self_attn.v_proj.bias",
    "attn.o_bias": "self_attn.o_proj.bias",
    "attn.q_norm": "self_attn.q_norm.weight",
    "attn.k_norm": "self_attn.k_norm.weight",
    "attn.sinks": "self_attn.sinks",
    "attn.q_a": "self_attn.q_a_proj.weight",
    "attn.q_a_norm": "self_attn.q_a_layernorm.weight",
    "attn.q_b": "self_attn.q_b_proj.weight",
    "attn.kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "attn.kv_a_norm": "self_attn.kv_a_layernorm.weight",
    "attn.kv_b": "self_attn.kv_b_proj.weight",
    "indexer.q": "self_attn.indexer.wq_b.weight",
    "indexer.k": "self_attn.indexer.wk.weight",
    "indexer.k_norm": "self_attn.indexer.k_norm.weight",
    "indexer.k_norm_bias": "self_attn.indexer.k_norm.bias",
    "indexer.weights": "self_attn.indexer.weights_proj.weight",
    "router.weight": "mlp.gate.weight",
    "router.bias": "mlp.router.bias",
    "router.correction_bias": "mlp.gate.e_score_correction_bias",
    # Gates of sub-experts and pruned rows: no published model has these; named for the
    # hash.
    "router.proxy_gate": "mlp.gate.proxy_gate.weight",
    "router.proxy_up": "mlp.gate.proxy_up.weight",
    "router.proxy_scale": "mlp.gate.proxy_scale",
    "router.proxy_prior": "mlp.gate.proxy_prior",
    "router.proxy_gate_bias": "mlp.gate.proxy_gate.bias",
    "router.proxy_up_bias": "mlp.gate.proxy_up.bias",
    "router.removed_weight": "mlp.gate.removed.weight",
    "router.removed_bias": "mlp.gate.removed.bias",
    "router.level_weight": "mlp.gate.level.weight",
    "router.level_bias": "mlp.gate.level.bias",
    **mlp_names("shared", "mlp.shared_experts."),
    "shared_gate": "mlp.shared_expert_gate.weight",
    **mlp_names("mlp", "mlp."),
}
# What a model without a head is saved as lacks the first word of these names.
_WITHOUT_MODEL = ("embed_tokens.", "layers.", "norm.", "embedding_norm.")
_LAYER_PREFIX = re.compile(r"model\.layers\.\d{1,9}\.")


class Piece(NamedTuple):
    """Some consecutive bytes of one HF tensor."""

    name: str
    first: int  # element of the tensor where the piece begins
    array: np.ndarray  # C-contiguous


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def family(config: ModelConfig) -> Family:
    """What the converter knows of the model's family."""
    return FAMILIES[config.model_type]


def publisher(config: ModelConfig) -> Callable[[str], str]:
    """Gives the name in published checkpoints of a tensor by its name in a file."""
    own = family(config)
    texts, renamed = tuple(own.text_names.items()), tuple(own.renamed.items())

    def published_name(name: str) -> str:
        for theirs, ours in texts:
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
                break
        if name.startswith(_WITHOUT_MODEL):
            name = "model." + name
        match = _LAYER_PREFIX.match(name) if renamed else None
        if match is None:
            return name
        prefix, rest = match[0], name[match.end() :]
        for theirs, published in renamed:
            if rest.startswith(theirs):
                return prefix + published + rest.removeprefix(theirs)
        return name

    return published_name


def dense_names(config: ModelConfig, item: Item) -> dict[str, str]:
    """Canonical -> HF name of the dense tensors of one item."""
    shapes = item_shapes(config, item)
    if isinstance(item, str):
        top = TOP | family(config).tensors
        return {name: top[name] for name in shapes}
    table = _LAYER | family(config).tensors
    prefix = layer_prefix(item)
    return {name: prefix + table[name] for name in shapes}


def shared_names(config: ModelConfig, layer: int) -> dict[str, str]:
    """Canonical -> HF name of a layer's shared expert, whether the model has one."""
    table = _LAYER | family(config).tensors
    prefix = layer_prefix(layer)
    return {n: prefix + table[n] for n in table if n.startswith("shared")}


def expert_names(config: ModelConfig, layer: int, expert: int) -> dict[str, str]:
    """Record part -> HF name of one expert (families with a tensor per expert)."""
    own = family(config)
    prefix = f"{layer_prefix(layer)}{own.expert_module}{expert}."
    return {part: prefix + name for part, name in own.expert_tensors.items()}


def is_fused(config: ModelConfig) -> bool:
    """Whether the family is published with fused experts."""
    return family(config).fused is not None


def has_columns(config: ModelConfig) -> bool:
    """Whether its fused experts are gpt-oss's."""
    return family(config).fused == "columns"


def _fused_form(config: ModelConfig) -> str:
    """How its fused experts stand: as published, or as transformers 5 saves them."""
    return family(config).fused or "halves"


def fused_shapes(config: ModelConfig, layer: int) -> Shapes:
    """HF name -> shape of the fused routed-expert tensors of a MoE layer."""
    moe, D = config.moe, config.d_model
    E, F = moe.num_experts, moe.expert_dim
    own = family(config)
    prefix = layer_prefix(layer) + own.expert_module
    gate_up, down = (prefix + name for name in own.fused_tensors)
    form = _fused_form(config)
    if form == "halves":
        return {gate_up: (E, 2 * F, D), down: (E, D, F)}
    if form == "turned":
        return {gate_up: (E, D, 2 * F), down: (E, F, D)}
    return {
        gate_up: (E, D, 2 * F),
        gate_up + "_bias": (E, 2 * F),
        down: (E, F, D),
        down + "_bias": (E, D),
    }


def expert_shapes(
    config: ModelConfig, layer: int, found: Container[str] = ()
) -> Shapes:
    """HF name -> shape of every routed-expert tensor of a MoE layer.

    Args:
      found: names in a folder; they tell whether its experts are fused.
    """
    fused = fused_shapes(config, layer)
    if is_fused(config) or any(name in found for name in fused):
        return fused
    part_shapes = RecordLayout.of(config).shapes
    return {
        name: part_shapes[part]
        for expert in range(config.moe.num_experts)
        for part, name in expert_names(config, layer, expert).items()
    }


def item_names(config: ModelConfig, item: Item) -> list[str]:
    """HF names of an item's tensors, each once, its routed experts among them."""
    names = [*dict.fromkeys(dense_names(config, item).values())]
    if item in config.moe_layers:
        names += expert_shapes(config, item)
    return names


def hf_shapes(config: ModelConfig, found: Container[str] = ()) -> Shapes:
    """HF name -> shape of every tensor of the model, item by item.

    Args:
      found: see `expert_shapes`; without it the names of published checkpoints.
    """
    shapes: Shapes = {}
    for item in dense_items(config):
        names = dense_names(config, item)
        for name, shape in item_shapes(config, item).items():
            shape = (1, *shape) if name in family(config).one_row else shape
            above = shapes.get(names[name])
            if above is not None:
                shape = (above[0] + shape[0], *shape[1:])
            shapes[names[name]] = shape
        if item in config.moe_layers:
            shapes |= expert_shapes(config, item, found)
    return shapes


def records_to_hf(
    config: ModelConfig, layer: int, first: int, records_NR: np.ndarray
) -> Iterator[Piece]:
    """The HF tensor bytes that stand in consecutive expert records.

    Args:
      layer: MoE layer.
      first: id of the first expert.
      records_NR: [experts, R] in any dtype.
    """
    layout = RecordLayout.of(config)
    if not is_fused(config):
        for i, record_R in enumerate(records_NR):
            for part, name in expert_names(config, layer, first + i).items():
                yield Piece(name, 0, layout.part(record_R, part))
        return
    names, form = list(fused_shapes(config, layer)), _fused_form(config)
    for i, record_R in enumerate(records_NR, first):
        part = {name: layout.part(record_R, name) for name in layout.shapes}
        for name, array in zip(names, _joined(form, part), strict=True):
            yield Piece(name, i * array.size, np.ascontiguousarray(array))


def _joined(form: str, part: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """One expert's slices of the fused tensors, which `split_fused` takes apart."""
    if form != "columns":
        gate_up, down = np.concatenate([part["gate"], part["up"]]), part["down"]
        return (gate_up, down) if form == "halves" else (gate_up.T, down.T)
    # Rows of gate and up, [F, D] each, alternate as columns of one [D, 2F].
    gate_up = np.stack([part["gate"], part["up"]], axis=1)
    bias = np.stack([part["gate_bias"], part["up_bias"]], axis=1).reshape(-1)
    gate_up = gate_up.reshape(bias.size, -1)
    return gate_up.T, bias, part["down"].T, part["down_bias"]


def split_fused(
    config: ModelConfig, arrays: Sequence[np.ndarray]
) -> dict[str, np.ndarray]:
    """The parts of a record, as views of one expert's slices of the fused tensors.

    Args:
      arrays: in the order of `fused_shapes`.
    """
    form = _fused_form(config)
    if form != "columns":
        gate_up, down = arrays if form == "halves" else (each.T for each in arrays)
        gate, up = np.split(gate_up, 2)
        return {"gate": gate, "up": up, "down": down}
    gate_up, gate_up_bias, down, down_bias = arrays
    return {
        "gate": gate_up[:, 0::2].T,
        "up": gate_up[:, 1::2].T,
        "down": down.T,
        "gate_bias": gate_up_bias[0::2],
        "up_bias": gate_up_bias[1::2],
        "down_bias": down_bias,
    }

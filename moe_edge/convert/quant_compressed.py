"""`quant_method: compressed-tensors`: groups of modules, each with its own format.

float-quantized and int-quantized store 8-bit weights (quant_scaled.py), pack-quantized
words of 4 or 8 bits (quant_ints.py). A group names its modules by `targets`: the class
Linear, names, or `re:` patterns, matched from a name's beginning; names win over
patterns, those over the class.
Source: compressed-tensors 0.20, quantization/quant_config.py and utils/match.py.
"""

import re
from typing import Any, NamedTuple

from moe_edge.convert.hf_tensors import Stored
from moe_edge.convert.packed_tensor import PackedTensor
from moe_edge.convert.quant_fields import QuantFields
from moe_edge.convert.quant_ints import BITS, PackQuantized, find_words
from moe_edge.convert.quant_scaled import (
    CHANNEL,
    FP8_DTYPES,
    INT8,
    TENSOR,
    Blocks,
    find_scaled,
)
from moe_edge.core.checks import CheckpointError

_FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")
_CLASSES = ("Linear",)
# A repetition of repetitions may take longer than anybody waits.
_REPEATED = re.compile(r"\)[*+{]")
_ROLES = {
    "packed": ".weight_packed",
    "scale": ".weight_scale",
    "shape": ".weight_shape",
    "zero?": ".weight_zero_point",
    "g_idx?": ".weight_g_idx",
}


class _Group(NamedTuple):
    """How the weights of some modules are stored."""

    targets: tuple[str, ...]
    packed: bool
    bits: int
    symmetric: bool
    ordered: bool  # whether weight_g_idx says which inputs are a group
    blocks: Blocks

    def rank(self, module: str) -> int:
        """How closely it names a module: 0 by name .. 2 by class, 3 not at all."""
        ranks = [3]
        for target in self.targets:
            if target == module:
                ranks.append(0)
            elif target.startswith("re:") and re.match(target[3:], module):
                ranks.append(1)
            elif target in _CLASSES:
                ranks.append(2)
        return min(ranks)


class CompressedTensors:
    """What the groups of a quantization_config say."""

    def __init__(self, fields: QuantFields):
        fields.ignore(
            *("ignore", "kv_cache_scheme", "quantization_status", "version"),
            *("global_compression_ratio", "run_compressed"),
        )
        sparsity = fields.get("sparsity_config", {})
        if not isinstance(sparsity, dict) or sparsity.get("format") not in (
            None,
            "dense",
        ):
            fields.refuse("sparsity_config", sparsity, 'a format of "dense"')
        fields.only("format", (*_FORMATS, "mixed-precision"))
        groups = fields.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            fields.refuse("config_groups", groups, "an object of groups")
        self._groups = [
            _read_group(fields, name, group) for name, group in groups.items()
        ]

    def _of(self, module: str, packed: bool) -> _Group:
        """The group of a module."""
        ranks = [group.rank(module) for group in self._groups]
        has_none, group = min(ranks) > 2, self._groups[ranks.index(min(ranks))]
        if has_none or group.packed != packed:
            why = "no group targets it" if has_none else "its group has another format"
            raise CheckpointError(
                f"{module} is {'packed' if packed else 'of 8 bits'}, but {why}; copy "
                "config.json again"
            )
        return group

    def _blocks(self, weight: str) -> tuple[Blocks, ...]:
        return (self._of(weight.removesuffix(".weight"), packed=False).blocks,)

    def _packed(self, weight: str, parts: dict[str, Stored]) -> PackedTensor:
        module = weight.removesuffix(".weight")
        group = self._of(module, packed=True)
        if group.symmetric == ("zero" in parts):
            raise CheckpointError(
                f"{module} has {'a' if group.symmetric else 'no'} weight_zero_point, "
                f"but its group is {'' if group.symmetric else 'not '}symmetric; copy "
                "config.json again"
            )
        if group.ordered and "g_idx" not in parts:
            raise CheckpointError(
                f"{module} has no weight_g_idx, but its group has actorder group; copy "
                "the folder again"
            )
        return PackQuantized(weight, parts, group.bits, group.blocks.cols)

    def find(self, files: dict[str, Stored]) -> list[PackedTensor]:
        """See `quantize.Scheme`."""
        found: list[PackedTensor] = find_words(files, _ROLES, self._packed)
        if not all(group.packed for group in self._groups):
            found += find_scaled(files, (*FP8_DTYPES, INT8), self._blocks)
        return found


def _read_group(outer: QuantFields, name: str, raw: Any) -> _Group:
    """One of `config_groups`."""
    if not isinstance(raw, dict):
        outer.refuse(f"config_groups.{name}", raw, "an object with targets and weights")
    fields = QuantFields(raw, f"{outer.where}, {name}")
    fields.ignore("input_activations", "output_activations")
    targets = fields.get("targets")
    if (
        not isinstance(targets, list)
        or not targets
        or not all(isinstance(target, str) for target in targets)
    ):
        fields.refuse("targets", targets, "a list of names")
    for target in targets:
        try:
            re.compile(target.removeprefix("re:"))
        except re.error as error:
            fields.refuse("targets", target, f"a regular expression ({error})")
        if target.startswith("re:") and _REPEATED.search(target):
            fields.refuse("targets", target, "no group that is repeated")
    stated = fields.get("format", outer.section["format"])
    if stated == "mixed-precision":
        fields.refuse("format", None, " or ".join(_FORMATS))
    packed = fields.only("format", _FORMATS, default=stated) == _FORMATS[0]
    section = fields.get("weights")
    if not isinstance(section, dict):
        fields.refuse("weights", section, "an object")
    fields.finish()
    weights = QuantFields(section, fields.where)
    weights.ignore("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    weights.only("dynamic", (False,), default=False)
    # By weight: only the order of calibration.
    orders = ("weight", "static", "group", "dynamic", False)
    ordered = weights.only("actorder", orders, False) in ("group", "dynamic")
    kind = weights.only("type", ("int",) if packed else ("int", "float"))
    bits = weights.only("num_bits", BITS if packed else (8,))
    symmetric = weights.only("symmetric", (True, False), default=True)
    if not symmetric and kind == "float":
        weights.refuse("symmetric", False, "true of floats")
    blocks = _read_blocks(weights, packed, symmetric)
    weights.finish()
    return _Group(tuple(targets), packed, bits, symmetric, ordered, blocks)


def _read_blocks(weights: QuantFields, packed: bool, symmetric: bool) -> Blocks:
    """Which weights share a scale."""
    plain = ("tensor", "channel", "group")
    group = weights.get("group_size")
    default = "tensor" if group is None else "channel" if group == -1 else "group"
    strategy = weights.only(
        "strategy", plain if packed else (*plain, "block"), default=default
    )
    structure = weights.get("block_structure")
    if strategy == "block":
        return Blocks(*weights.pair("block_structure", structure))
    if structure is not None:
        weights.refuse("block_structure", structure, "none without strategy block")
    if strategy == "group":
        return Blocks(1, weights.whole("group_size"))
    if strategy == "tensor" and packed and not symmetric:
        weights.refuse("strategy", strategy, "channel or group of weights with zeros")
    return TENSOR if strategy == "tensor" else CHANNEL

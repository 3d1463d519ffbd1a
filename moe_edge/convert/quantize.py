"""The quantised formats that Hugging Face folders come in, by `quantization_config`.

  fp8                 quant_scaled.py: DeepSeek-V3's blocks, or a scale a tensor or row
  compressed-tensors  quant_compressed.py: FP8 and INT8 as of fp8, packed INT4 and INT8
  awq, gptq           quant_ints.py
  mxfp4               quant_mxfp4.py

Each weight that has its scales next to it is dequantised; lists of modules that were
left as they are need not be followed, as these have none. What a format cannot hold, or
we cannot read, is refused by the field that says so.
"""

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from moe_edge.convert.hf_tensors import Stored
from moe_edge.convert.packed_tensor import PackedTensor
from moe_edge.convert.quant_compressed import CompressedTensors
from moe_edge.convert.quant_fields import QuantFields
from moe_edge.convert.quant_ints import BITS, Awq, Gptq, find_words
from moe_edge.convert.quant_mxfp4 import find_mxfp4
from moe_edge.convert.quant_scaled import (
    CHANNEL,
    FP8_DTYPES,
    TENSOR,
    Blocks,
    find_scaled,
    why_unread,
)
from moe_edge.core.checks import ConfigError

# Finds the quantised weights among tensors by their published names, and raises
# CheckpointError for parts that are missing or do not belong together.
Find = Callable[[dict[str, Stored]], list[PackedTensor]]


# Methods by which activations, too, may be rounded. To others a scale of activations is
# a tensor that nobody knows: it may be a factor of the model.
_ROUND_ACTIVATIONS = "fp8", "compressed-tensors"


class Scheme(NamedTuple):
    """How a folder's weights are quantised; `method`: as `quant_method` says it."""

    method: str
    find: Find

    def why_unread(self, name: str) -> str | None:
        """Why a tensor that belongs to the quantisation is left out, if it is."""
        return why_unread(name) if self.method in _ROUND_ACTIVATIONS else None


def _fp8(fields: QuantFields) -> Find:
    fields.ignore(
        *("activation_scheme", "fmt", "scale_fmt", "modules_to_not_convert"),
        *("ignored_layers", "dequantize", "kv_cache_scheme"),
    )
    block, known = fields.get("weight_block_size"), (TENSOR, CHANNEL)
    if block is not None:
        known = (Blocks(*fields.pair("weight_block_size", block)),)
    return functools.partial(find_scaled, dtypes=FP8_DTYPES, blocks_of=lambda _: known)


def _mxfp4(fields: QuantFields) -> Find:
    fields.ignore("modules_to_not_convert", "dequantize")
    return find_mxfp4


_WORDS = {"words": ".qweight", "zero": ".qzeros", "scale": ".scales"}


def _awq(fields: QuantFields) -> Find:
    fields.ignore(
        *("modules_to_not_convert", "backend", "do_fuse", "fuse_max_seq_len"),
        *("modules_to_fuse", "exllama_config", "desc_act", "sym", "damp_percent"),
        *("true_sequential", "dataset", "meta", "static_groups"),
    )
    fields.only("bits", (4,))
    fields.only("zero_point", (True,), default=True)
    # Three names that writers give one field; gemm where none is there.
    for name in ("version", "format", "checkpoint_format"):
        fields.only(name, ("gemm", "GEMM"), default="gemm")
    make = functools.partial(Awq, bits=4, group=fields.group_size())
    return functools.partial(find_words, roles=_WORDS, make=make)


def _gptq(fields: QuantFields) -> Find:
    fields.ignore(
        *("desc_act", "sym", "true_sequential", "damp_percent", "static_groups"),
        *("damp_auto_increment", "model_name_or_path", "model_file_base_name"),
        *("lm_head", "meta", "backend", "tokenizer", "dataset", "exllama_config"),
        *("use_exllama", "disable_exllama", "use_cuda_fp16", "max_input_length"),
        *("model_seqlen", "block_name_to_quantize", "batch_size", "pad_token_id"),
        *("module_name_preceding_first_block", "cache_block_outputs", "mse"),
        *("modules_in_block_to_quantize", "act_group_aware", "modules_to_not_convert"),
        "hyb_act",
    )
    bits = fields.only("bits", BITS)
    fields.only("pack_dtype", ("int32",), default="int32")
    fields.only("is_marlin_format", (False,), default=False)
    formats = {
        fields.only(name, ("gptq", "gptq_v2"), default="gptq")
        for name in ("checkpoint_format", "format")
    }
    # Overrides of single modules; "-:" names those that were left as they are.
    dynamic = fields.get("dynamic") or {}
    if not isinstance(dynamic, dict) or any(k[:2] != "-:" for k in dynamic):
        fields.refuse("dynamic", dynamic, "no module with settings of its own")
    make = functools.partial(
        Gptq, bits=bits, group=fields.group_size(), less_one="gptq_v2" not in formats
    )
    roles = _WORDS | {"g_idx?": ".g_idx"}
    return functools.partial(find_words, roles=roles, make=make)


_METHODS = {
    "fp8": _fp8,
    "compressed-tensors": lambda fields: CompressedTensors(fields).find,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}


def quantization(raw: dict[str, Any]) -> Scheme | None:
    """How the weights of a config.json are quantised; None: they are not.

    Raises:
      ConfigError: a method that is not known, or a field of it that says something
        which is not implemented.
    """
    section = raw.get("quantization_config")
    if section is None:
        return None
    method = section.get("quant_method") if isinstance(section, dict) else None
    if not isinstance(method, str) or method not in _METHODS:
        raise ConfigError(
            f"quantization_config has quant_method {json.dumps(method)[:60]}; known: "
            f"{', '.join(_METHODS)}. Convert from an unquantised copy of the model"
        )
    fields = QuantFields(section, method)
    find = _METHODS[method](fields)
    fields.finish()
    return Scheme(method, find)

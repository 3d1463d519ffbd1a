"""As what a conversion writes weights: cast, quantised, in eights, or decoded."""

import math
from collections.abc import Iterable

import numpy as np

from moe_edge.checkpoint.reader import CheckpointReader
from moe_edge.checkpoint.schema import Item, dense_items, item_shapes, name_some
from moe_edge.convert import rules
from moe_edge.convert.gguf_reader import GgufReader
from moe_edge.convert.kept import Kept
from moe_edge.convert.requantise import Dequantised, Interleaved, Quantised, not_whole
from moe_edge.core.checks import CheckpointError, ConfigError, check_known
from moe_edge.core.progress import say_once
from moe_edge.model.quantised import BLOCK, KEPT_KINDS, KINDS, format_of, row_bytes

EXPERT_DTYPES = (*KINDS, *KEPT_KINDS)


def as_written(
    reader,
    to: str,
    expert_dtype: str | None,
    dense: str | None,
    wanted: np.dtype | None,
):
    """The reader, or one that quantises its weights, or one that undoes it.

    Args:
      to: the format: "ours" or "hf".
      expert_dtype, dense: what experts and dense matrices are quantised to; None: not.
      wanted: the dtype that weights are cast to; None: as stored.

    Raises:
      ConfigError: an unknown kind, one for a HF folder, or sizes that it cannot hold.
      CheckpointError: weights that are quantised already.
    """
    kind = reader.layout.kind
    if expert_dtype is not None:
        check_known("expert dtype", expert_dtype, EXPERT_DTYPES)
        if to == "hf":
            flag = "--dtype" if dense == expert_dtype else "--expert_dtype"
            raise ConfigError(
                f"{flag} {expert_dtype} is of our format, Hugging Face folders have no "
                f"such weights; leave out one of {flag} and --to hf"
            )
    is_ours = isinstance(reader, CheckpointReader)
    was = format_of(kind or reader.dense_kind)
    if to == "ours" and is_ours and was is not None:
        raise CheckpointError(
            f"{reader.path} has {was} weights and is in our format already; convert "
            "the checkpoint it was made from"
        )
    if isinstance(reader, GgufReader):
        _say_rounded(reader, expert_dtype, dense)
    if dense is not None and (floats := not_whole(reader.config)):
        say_once(
            f"{reader.path}: {name_some(sorted(floats))} stay as they are: their rows "
            f"are no whole blocks of {BLOCK} weights"
        )
    if to == "hf":
        return Dequantised(reader, wanted) if kind or reader.dense_kind else reader
    if expert_dtype in KEPT_KINDS:
        reader, expert_dtype = Kept(reader, expert_dtype), None
    if expert_dtype is None and dense is None:
        changed = reader  # blocks of a GGUF file among its weights are taken over
    else:
        changed = Quantised(reader, expert_dtype, dense)
    in_blocks = changed.layout.kind or changed.dense_kind
    return Interleaved(changed) if in_blocks else changed


def _say_rounded(reader: GgufReader, expert_dtype: str | None, dense: str | None):
    for what, was, new in (
        ("experts", reader.decoded_experts or reader.layout.kind, expert_dtype),
        ("dense weights", reader.quantised_dense, dense),
    ):
        if new is not None and was is not None and was != new:
            say_once(
                f"{reader.path}: {was} {what} are quantised again as {new}, which "
                "rounds them a second time"
            )


def num_bytes(reader, items: Iterable[Item]) -> int:
    """Of the weights of some items as they will be written."""
    config, layout, total, layers = reader.config, reader.layout, 0, 0
    for item in items:
        layers += item in config.moe_layers
        dtypes, kinds = reader.dense_dtypes(item), reader.dense_kinds(item)
        for name, shape in item_shapes(config, item).items():
            if name in kinds:
                total += shape[0] * row_bytes(kinds[name], shape[1])
            else:
                total += math.prod(shape) * dtypes[name].itemsize
    size = layout.num_values if layout.kind is None else layout.size
    records = layers * config.moe.num_experts
    return total + records * size * reader.dtype.itemsize


def hf_dtypes(reader) -> dict[str, np.dtype]:
    """HF name -> dtype of every tensor that a checkpoint holds."""
    config = reader.config
    dtypes: dict[str, np.dtype] = {}
    for item in dense_items(config):
        names = rules.dense_names(config, item)
        stored = reader.dense_dtypes(item)
        dtypes |= {names[name]: dtype for name, dtype in stored.items()}
        if item in config.moe_layers:
            kept = reader.layout.value_dtype(reader.dtype)
            dtypes |= dict.fromkeys(rules.expert_shapes(config, item), kept)
    return dtypes

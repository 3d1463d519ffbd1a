"""Reads a checkpoint as if it had fewer experts, and writes that in our format."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.checkpoint.reader import DenseReader
from moe_edge.checkpoint.schema import Item
from moe_edge.convert.hf_files import converted_config
from moe_edge.convert.sinks import OursSink
from moe_edge.convert.stream import stream
from moe_edge.core.files import check_room
from moe_edge.model.pruned import Kept, pruned_config

# What has a row or an entry an expert.
ROUTER = ("weight", "bias", "correction_bias", "expert_scale")
REMOVED = ("weight", "bias")  # of these rows stay


class Pruned(DenseReader):
    """Another reader's model with some of its experts.

    Args:
      reader: of either format, with weights in floats.
      kept: by MoE layer.
    Raises:
      ConfigError: see `pruned_config`.
    """

    dense_kind = None

    def __init__(self, reader, kept: Kept):
        self._inner, self._kept = reader, kept
        self.config = pruned_config(reader.config, kept)
        self.layout, self.dtype = reader.layout, reader.dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def dense(self, item: Item) -> dict[str, np.ndarray]:
        """Canonical name -> array of one item; a router has fewer rows."""
        arrays = dict(self._inner.dense(item))
        if item not in self._kept:
            return arrays
        kept = self._kept[item]
        gone = np.setdiff1d(np.arange(self._inner.config.moe.num_experts), kept)
        for name in ROUTER:
            rows = arrays.get(f"router.{name}")
            if rows is None:
                continue
            arrays[f"router.{name}"] = rows[kept]
            if self.config.moe.removed_experts and name in REMOVED:
                arrays[f"router.removed_{name}"] = rows[gone]
        return arrays

    def dense_dtypes(self, item: Item) -> dict[str, np.dtype]:
        """Canonical name -> dtype of what `dense` returns."""
        dtypes = dict(self._inner.dense_dtypes(item))
        if item in self._kept and self.config.moe.removed_experts:
            rows = {n: dtypes.get(f"router.{n}") for n in REMOVED}
            dtypes |= {f"router.removed_{n}": d for n, d in rows.items() if d}
        return dtypes

    def read_experts(self, layer: int, first: int, out_NR: np.ndarray) -> None:
        """Fills `out_NR` with consecutive records of what is left."""
        for i, out_R in enumerate(out_NR, first):
            self._inner.read_experts(layer, self._kept[layer][i], out_R[None])


def write_pruned(
    reader, kept: Kept, folder: Path, origin: dict[str, Any]
) -> tuple[str, int]:
    """Writes what is left of a model into an empty folder.

    Args:
      reader: the parent.
      origin: by, parent_sha256, profile, for the manifest.
    Returns:
      the content hash, and the bytes of the experts' records.
    """
    pruned, parent = Pruned(reader, kept), reader.config
    size = pruned.layout.num_bytes(pruned.dtype) * pruned.config.moe.num_experts
    size *= len(parent.moe_layers)
    check_room(folder, size)
    if reader.quantized is not None:  # read, and now stored, unquantised
        raw = converted_config(parent.hf_config, reader.dtype.name, changed=True)
        parent = dataclasses.replace(parent, hf_config=raw)
    listed = {str(layer): list(map(int, ids)) for layer, ids in kept.items()}
    sink = OursSink(folder, parent, pruned, pruned={"kept": listed, **origin})
    try:
        digest = stream(pruned, sink, allow_nonfinite=False)
        sink.finish(digest)
    finally:
        sink.close()
    return digest, size

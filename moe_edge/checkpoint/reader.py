"""Reads a checkpoint of ours: lazily, layer by layer."""

from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.checkpoint.dense import read_item, stored_dtypes
from moe_edge.checkpoint.dtypes import RECORD_DTYPES, cast, cast_dense
from moe_edge.checkpoint.experts_file import experts_path, open_records, read_records
from moe_edge.checkpoint.manifest import (
    HF_FOLDER,
    TOKENIZER_NAME,
    check_manifest,
    config_of_manifest,
    with_kind,
)
from moe_edge.checkpoint.schema import Item, dense_items, item_shapes
from moe_edge.core.checks import CheckpointError
from moe_edge.model.config import ModelConfig


class DenseReader:
    """What readers of both formats derive from their `config` and `dense(item)`."""

    def top(self) -> dict[str, np.ndarray]:
        """Canonical name -> array, outside the layers."""
        items = [item for item in dense_items(self.config) if isinstance(item, str)]
        return {name: a for item in items for name, a in self.dense(item).items()}

    def dense_layer(self, layer: int) -> dict[str, np.ndarray]:
        """Canonical name -> array of a layer's dense tensors."""
        return self.dense(layer)


class CheckpointReader(DenseReader):
    """Our format.

    Attributes:
      config: the model; of a refactored one, its experts are sub-experts.
      parent_config: the model before it was refactored.
      dtype: numpy dtype of the expert records as returned; uint8 of quantised ones,
        which `dtype` of the constructor leaves as they are.
      layout: where the parts of a record stand.
    """

    quantized = None
    dropped: list[str] = []

    def __init__(
        self,
        folder: Path,
        manifest: dict[str, Any],
        config: ModelConfig,
        dtype: np.dtype | None = None,
    ):
        self.path = Path(folder).resolve()
        self.manifest = manifest
        self.parent_config = config = with_kind(config, manifest["dtype"])
        self._stored = RECORD_DTYPES[manifest["dtype"]]
        self._cast = dtype
        as_stored = dtype is None or config.moe.expert_kind is not None
        self.dtype = self._stored if as_stored else np.dtype(dtype)
        self.layout = check_manifest(self.path, manifest, config)
        self.config = config_of_manifest(self.path, manifest, config)
        # All layer files are checked now, so that a damaged one fails at the start.
        for layer in config.moe_layers:
            self._records(layer)

    def _records(self, layer: int) -> np.ndarray:
        rows = self.config.moe.num_experts
        path = experts_path(self.path, layer)
        return open_records(path, rows, self.layout.size, self._stored)

    @property
    def tokenizer_path(self) -> Path | None:
        if self.manifest["tokenizer"] is None:
            path = self.hf_files / TOKENIZER_NAME  # a user may have put it there
            return path if path.is_file() else None
        path = (self.path / self.manifest["tokenizer"]).resolve()
        if not path.is_relative_to(self.path) or not path.is_file():
            raise CheckpointError(
                f"{self.path}: tokenizer {self.manifest['tokenizer']!r} of the "
                "manifest is not a file of the checkpoint"
            )
        return path

    @property
    def hf_source(self) -> str | None:
        source = self.manifest["source"].get("hf_path")
        return source if isinstance(source, str) else None

    @property
    def hf_files(self) -> Path:
        """Folder with the small files of the HF folder."""
        return self.path / HF_FOLDER

    def dense(self, item: Item) -> dict[str, np.ndarray]:
        """Canonical name -> array of one item."""
        arrays = read_item(self.path, item, item_shapes(self.config, item))
        return {
            name: cast_dense(name, array, self._cast) for name, array in arrays.items()
        }

    def dense_dtypes(self, item: Item) -> dict[str, np.dtype]:
        """Canonical name -> dtype of what `dense` returns."""
        stored = stored_dtypes(self.path, item, item_shapes(self.config, item))
        empty = {name: np.empty(0, dtype) for name, dtype in stored.items()}
        return {n: cast_dense(n, array, self._cast).dtype for n, array in empty.items()}

    def experts(self, layer: int) -> np.ndarray:
        """Records [E, R] of a MoE layer; memory-mapped unless cast."""
        records = self._records(layer)
        return cast(records, self.dtype)

    def read_experts(self, layer: int, first: int, out_NR: np.ndarray) -> None:
        """Fills `out_NR` with consecutive records beginning with row `first`."""
        path = experts_path(self.path, layer)
        if out_NR.dtype == self._stored:
            read_records(path, first, out_NR)
        else:
            stored = np.empty(out_NR.shape, self._stored)
            read_records(path, first, stored)
            np.copyto(out_NR, cast(stored, out_NR.dtype))

    def release(self) -> None:
        """Nothing is kept between calls."""

    def content_sha256(self) -> str:
        """The hash stored at conversion."""
        return self.manifest["content_sha256"]

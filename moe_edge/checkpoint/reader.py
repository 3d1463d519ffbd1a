"""Reads a checkpoint of ours: lazily, layer by layer."""

from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.checkpoint.checksums import check_records, make_trailer
from moe_edge.checkpoint.dense import item_path, read_item, stored_dtypes
from moe_edge.checkpoint.dtypes import RECORD_DTYPES, cast, cast_dense
from moe_edge.checkpoint.experts_file import (
    experts_path,
    in_parts,
    open_records,
    read_records,
)
from moe_edge.checkpoint.manifest import (
    HF_FOLDER,
    TOKENIZER_NAME,
    check_manifest,
    config_of_manifest,
    read_checksums,
    with_kind,
)
from moe_edge.checkpoint.schema import Item, dense_items, item_shapes
from moe_edge.core.checks import CheckpointError
from moe_edge.core.progress import say_once
from moe_edge.model.config import ModelConfig
from moe_edge.model.quantised import Matrix
from moe_edge.model.shapes import layer_shapes


class DenseReader:
    """What readers of all formats derive from their `config`, `dense` and
    `read_experts`.

    Attributes:
      dense_kind: the kinds of blocks that dense matrices are read in, such as "q4_0" or
        "q4_0+q8_0"; None: all are numbers.
    """

    dense_kind: str | None = None

    def dense_kinds(self, item: Item) -> dict[str, str]:
        """Canonical name -> kind of those that `dense` returns as a `Matrix`."""
        del item
        return {}

    def experts(self, layer: int) -> np.ndarray:
        """The records [E, R] of a MoE layer, assembled in memory."""
        records = np.empty((self.config.moe.num_experts, self.layout.size), self.dtype)
        self.read_experts(layer, 0, records)
        return records

    def top(self) -> dict[str, np.ndarray | Matrix]:
        """Canonical name -> array, outside the layers."""
        items = [item for item in dense_items(self.config) if isinstance(item, str)]
        return {name: a for item in items for name, a in self.dense(item).items()}

    def dense_layer(self, layer: int) -> dict[str, np.ndarray | Matrix]:
        """Canonical name -> array of the dense tensors that a layer computes with."""
        computed = layer_shapes(self.config, layer)
        return {name: a for name, a in self.dense(layer).items() if name in computed}


class CheckpointReader(DenseReader):
    """Our format.

    Attributes:
      config: the model; of a refactored one, its experts are sub-experts.
      parent_config: the model before it was refactored.
      dtype: numpy dtype of the expert records as returned; uint8 of quantised ones,
        which `dtype` of the constructor leaves as they are.
      layout: where the parts of a record stand.
      checksums: of the files, checked as weights are read; None: an old checkpoint.
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
        self.dense_kind = manifest.get("dense_dtype")
        self._cast = dtype
        as_stored = dtype is None or config.moe.expert_kind is not None
        self.dtype = self._stored if as_stored else np.dtype(dtype)
        self.layout = check_manifest(self.path, manifest, config)
        self.config = config_of_manifest(self.path, manifest, config)
        self.checksums = read_checksums(self.path, manifest, self.config)
        if self.checksums is None:
            say_once(
                f"{self.path} is of format version 1, without checksums: damaged or "
                "exchanged files would not be noticed; convert (or refactor) the model "
                "again to have them checked"
            )
        # All layer files are checked now, so that a damaged one fails at the start.
        for layer in config.moe_layers:
            self._records(layer)

    def _records(self, layer: int, large_pages: bool = False) -> np.ndarray:
        rows = self.config.moe.num_experts
        path = experts_path(self.path, layer)
        sums = self.checksums
        trailer = make_trailer(layer, sums.experts[layer]) if sums else b""
        given = self.layout.size, self._stored, trailer, large_pages
        return open_records(path, rows, *given)

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

    def dense(self, item: Item) -> dict[str, np.ndarray | Matrix]:
        """Canonical name -> array of one item; what is in blocks is not cast."""
        arrays = read_item(self.path, item, item_shapes(self.config, item))
        if self.checksums is not None:
            self.checksums.check_dense(item_path(self.path, item), item, arrays)
        return {
            name: array
            if isinstance(array, Matrix)
            else cast_dense(name, array, self._cast)
            for name, array in arrays.items()
        }

    def _stored_dtypes(self, item: Item) -> dict[str, np.dtype | str]:
        return stored_dtypes(self.path, item, item_shapes(self.config, item))

    def dense_kinds(self, item: Item) -> dict[str, str]:
        if self.dense_kind is None:
            return {}
        stored = self._stored_dtypes(item)
        return {name: kind for name, kind in stored.items() if isinstance(kind, str)}

    def dense_dtypes(self, item: Item) -> dict[str, np.dtype]:
        """Canonical name -> dtype of what `dense` returns; float32 of blocks."""
        found = {}
        for name, dtype in self._stored_dtypes(item).items():
            if isinstance(dtype, str):
                found[name] = np.dtype(np.float32)
            else:
                found[name] = cast_dense(name, np.empty(0, dtype), self._cast).dtype
        return found

    def experts(self, layer: int, large_pages: bool = False) -> np.ndarray:
        """Records [E, R] of a MoE layer, checked; memory-mapped unless cast, in large
        pages where they are asked for and the system can."""
        records = self._records(layer, large_pages)
        if self.checksums is not None:
            path, crcs = experts_path(self.path, layer), self.checksums.experts[layer]
            in_parts(
                records,
                lambda part: check_records(path, part.start, records[part], crcs),
            )
        return cast(records, self.dtype)

    def map_experts(self, layer: int) -> np.ndarray:
        """Records [E, R] of a MoE layer as stored, memory-mapped and not read: of the
        checksums only the layer and the tag of their file are checked."""
        return self._records(layer)

    def read_experts(self, layer: int, first: int, out_NR: np.ndarray) -> None:
        """Fills `out_NR` with consecutive records beginning with row `first`."""
        path = experts_path(self.path, layer)
        crcs = None if self.checksums is None else self.checksums.experts[layer]
        if out_NR.dtype == self._stored:
            read_records(path, first, out_NR, crcs)
        else:
            stored = np.empty(out_NR.shape, self._stored)
            read_records(path, first, stored, crcs)
            np.copyto(out_NR, cast(stored, out_NR.dtype))

    def release(self) -> None:
        """Nothing is kept between calls."""

    def content_sha256(self) -> str:
        """The hash stored at conversion."""
        return self.manifest["content_sha256"]

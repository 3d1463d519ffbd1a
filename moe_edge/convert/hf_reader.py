"""A Hugging Face folder as a checkpoint: config, dense tensors, expert records."""

import dataclasses
import math
from pathlib import Path

import numpy as np

from moe_edge.checkpoint.dtypes import KEEP_FLOAT32
from moe_edge.checkpoint.manifest import TOKENIZER_NAME
from moe_edge.checkpoint.reader import DenseReader
from moe_edge.checkpoint.schema import Item, check_tensors, item_shapes, name_some
from moe_edge.convert import rules
from moe_edge.convert.families import config_from_hf
from moe_edge.convert.hf_files import CONFIG_NAME, read_generation
from moe_edge.convert.tensor_source import TensorSource
from moe_edge.core.checks import CheckpointError
from moe_edge.core.heap import collector_paused
from moe_edge.core.json_reader import read_json
from moe_edge.model.config import ModelConfig
from moe_edge.model.record import RecordLayout


def expert_dtype(
    path: Path, config: ModelConfig, source: TensorSource
) -> np.dtype | None:
    """The one dtype of all routed experts; None: it is not known.

    Args:
      path: for messages.
    Raises:
      CheckpointError: no experts, or several dtypes.
    """
    dtypes: dict[np.dtype | None, str] = {}
    for layer in config.moe_layers:
        for name in rules.expert_shapes(config, layer, source.shapes):
            dtypes.setdefault(source.dtype(name), name)
    if not dtypes:
        raise CheckpointError(
            f"{path}: every layer is dense; expected at least one MoE layer"
        )
    mixed = [f"{name} ({dtype.name})" for dtype, name in dtypes.items() if dtype]
    if len(mixed) > 1:
        raise CheckpointError(
            f"{path}: experts are stored in several dtypes: {name_some(mixed)}; "
            "convert with --dtype"
        )
    return next(iter(dtypes))


class HfReader(DenseReader):
    """Reads an HF folder without converting it.

    Every tensor name and shape is checked against the config at construction; no
    weight is read before it is asked for.

    Attributes:
      config: the model.
      dtype: numpy dtype of the expert records.
      source: its tensors.
      layout: where the parts of an expert stand in a record of `experts(i)`.
      dropped: tensor names of the file that the model does not use.
      untied: whether the file has a head of its own although its config.json ties it
        to the embedding; the file is believed, and `config` says so.
    """

    @collector_paused()
    def __init__(self, path: str | Path, dtype: np.dtype | None = None):
        self.path = self.hf_files = Path(path).resolve()
        self.config = config_from_hf(
            read_json(self.path / CONFIG_NAME, CheckpointError, strict=False),
            read_generation(self.path),
        )
        self.source = TensorSource(self.path, self.config, dtype)
        self.dropped, self.untied = list(self.source.unused), self.source.untied
        if self.untied:
            raw = self.config.hf_config | {"tie_word_embeddings": False}
            self.config = dataclasses.replace(
                self.config, tie_embeddings=False, hf_config=raw
            )
        found = self.source.shapes
        check_tensors(str(path), found, rules.hf_shapes(self.config, found))
        self.source.check_dtypes()
        self.layout = RecordLayout.of(self.config)
        self.dtype = expert_dtype(self.path, self.config, self.source)

    @property
    def quantized(self) -> str | None:
        """The method of its quantization_config, such as "fp8"; None: none."""
        return self.source.method

    @property
    def weight_files(self) -> list[Path]:
        """The files that hold its tensors."""
        return self.source.files

    @property
    def tokenizer_path(self) -> Path | None:
        path = self.path / TOKENIZER_NAME
        return path if path.is_file() else None

    @property
    def hf_source(self) -> str | None:
        return str(self.path)

    def dense(self, item: Item) -> dict[str, np.ndarray]:
        """Canonical name -> array of one item; views of the file where possible."""
        shapes, found, rows = item_shapes(self.config, item), {}, {}
        for name, hf_name in rules.dense_names(self.config, item).items():
            shape = shapes[name]
            array = self.source.read(hf_name, name in KEEP_FLOAT32)
            if array.size > math.prod(shape):  # several are one tensor
                begin = rows.get(hf_name, 0)
                rows[hf_name] = begin + shape[0]
                array = array[begin : rows[hf_name]]
            found[name] = array.reshape(shape)
        return found

    def dense_dtypes(self, item: Item) -> dict[str, np.dtype]:
        """Canonical name -> dtype of what `dense` returns."""
        return {
            name: self.source.dtype(hf_name, name in KEEP_FLOAT32)
            for name, hf_name in rules.dense_names(self.config, item).items()
        }

    def read_experts(self, layer: int, first: int, out_NR: np.ndarray) -> None:
        """Fills `out_NR` with the records of experts first, first + 1, ..."""
        out_NR[:, self.layout.num_values :] = 0
        fused = list(rules.fused_shapes(self.config, layer))
        is_fused = fused[0] in self.source.shapes
        for i, out_R in enumerate(out_NR):
            if is_fused:
                stored = [self.source.read_expert(n, first + i) for n in fused]
                for part, array in rules.split_fused(self.config, stored).items():
                    np.copyto(self.layout.part(out_R, part), array)
            else:
                names = rules.expert_names(self.config, layer, first + i)
                for part, name in names.items():
                    self.source.read_into(name, self.layout.part(out_R, part))

    def release(self) -> None:
        """Lets the kernel take back what was read; arrays stay valid."""
        self.source.release()

    def content_sha256(self) -> str:
        """Reads the whole folder once; see content_hash.py."""
        from moe_edge.convert.stream import content_sha256

        return content_sha256(self)

"""The tensors of an HF folder under their plain names, dequantised and cast.

Hides shards, scales and packing: what is asked for by name comes as an array of the
wanted dtype. Names that no model uses (rotary buffers, multi-token prediction layers, a
tied model's copy of the embedding, scales of activations) are set aside and reported.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from moe_edge.checkpoint.dtypes import WEIGHT_DTYPES, cast
from moe_edge.checkpoint.schema import Shapes, name_some
from moe_edge.convert import rules
from moe_edge.convert.hf_tensors import EMBED, HEAD, named_tensors
from moe_edge.convert.packed_tensor import PackedTensor
from moe_edge.convert.quantize import Scheme, quantization
from moe_edge.convert.safetensors_reader import SafetensorsFile
from moe_edge.core.checks import CheckpointError, ConfigError
from moe_edge.model.config import ModelConfig

_ROWS = 4096  # of two tensors that are compared together


class TensorSource:
    """Reads logical tensors of one folder.

    Args:
      folder: with config.json and, unless `files` has them, weights.
      config: the model.
      dtype: cast weights to it; None: as stored.
      files: name -> file that holds it, None where that is not there; given, no values
        are looked at.

    Attributes:
      shapes: published name -> shape; None where the file is not there.
      unused: name, as in the files, of what is set aside because the model does not
        use it -> why.
      untied: whether a head in the file differs from the embedding although the config
        ties them; the model uses it then, as in transformers.
      method: of a quantised folder, as its `quant_method` says it; None.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        dtype: np.dtype | None,
        files: Mapping[str, SafetensorsFile | None] | None = None,
    ):
        scheme = quantization(config.hf_config)
        self.method = None if scheme is None else scheme.method
        if self.method == "mxfp4" and not rules.has_columns(config):
            raise ConfigError(
                "quantization_config has quant_method 'mxfp4', whose layout is known "
                f"only of gpt_oss, got {config.model_type}; convert from an "
                "unquantised copy of the model"
            )
        # Those that are a weight alone, and those that are dequantised from several.
        self._files, self.unused = named_tensors(folder, config, files)
        self._packed: dict[str, PackedTensor] = {}
        self._open = {stored.file for stored in self._files.values()}
        self._dtype, has_values = dtype, files is None
        if scheme is not None:
            self._join(folder, scheme)
        self.shapes: Shapes = {name: s.shape for name, s in self._files.items()}
        self.shapes |= {name: packed.shape for name, packed in self._packed.items()}
        if self.method == "gptq":
            self._set_zero_biases_aside(config, has_values)
        self.untied = False
        if config.tie_embeddings and {EMBED, HEAD} <= self.shapes.keys():
            self.untied = has_values and not self._are_equal(EMBED, HEAD)
            if not self.untied:
                told = "" if has_values else ", unless its values differ from that"
                self._set_aside(HEAD, f"tied to the embedding{told}")

    def _join(self, folder: Path, scheme: Scheme) -> None:
        """Takes the parts of quantised weights, and what else belongs to them."""
        self._packed = {packed.name: packed for packed in scheme.find(self._files)}
        if not self._packed:
            raise CheckpointError(
                f"{folder}: config.json has a quantization_config of {self.method}, "
                f"but no tensor is {self.method} with its scales; remove it if the "
                "weights are not quantised, else copy the folder again"
            )
        joined = {part.name for p in self._packed.values() for part in p.parts.values()}
        for name, stored in list(self._files.items()):
            if stored.name in joined:
                del self._files[name]
            elif reason := scheme.why_unread(name):
                self.unused[self._files.pop(name).name] = reason

    def _set_aside(self, name: str, reason: str) -> None:
        del self.shapes[name]
        if name in self._packed:
            parts = self._packed.pop(name).parts.values()
            self.unused |= {part.name: reason for part in parts}
        else:
            self.unused[self._files.pop(name).name] = reason

    def _set_zero_biases_aside(self, config: ModelConfig, has_values: bool) -> None:
        """GPTQ's writers gave every packed weight a bias, of zeros if it had none."""
        added = [
            name
            for name in self._files
            if name.endswith(".bias")
            and name.removesuffix(".bias") + ".weight" in self._packed
        ]
        expected = rules.hf_shapes(config, self.shapes) if added else {}
        for name in added:
            stored = self._files[name]
            if name not in expected and not (has_values and stored.tensor().any()):
                self._set_aside(name, "a bias of zeros, which GPTQ's writers add")

    def _are_equal(self, first: str, second: str) -> bool:
        """Whether two matrices hold the same values."""
        shape = self.shapes[first]
        if len(shape) != 2 or shape != self.shapes[second]:
            return False
        pair = [
            self.read(name) if name in self._packed else self._files[name].tensor()
            for name in (first, second)
        ]
        if pair[0].dtype == pair[1].dtype:
            pair = [array.view(np.uint8) for array in pair]
        for start in range(0, len(pair[0]), _ROWS):
            left, right = (array[start : start + _ROWS] for array in pair)
            if left.dtype != right.dtype:
                left, right = left.astype(np.float64), right.astype(np.float64)
            if not np.array_equal(left, right):
                return False
        return True

    @property
    def files(self) -> list[Path]:
        """Those that hold a tensor."""
        return sorted(file.path for file in self._open)

    def check_dtypes(self) -> None:
        """Refuses tensors that hold no weights (integers, bytes, unscaled FP8)."""
        allowed = set(WEIGHT_DTYPES.values())
        if self._dtype is not None:
            allowed.add(np.dtype(np.float64))
        wrong = [
            f"{name} ({stored.dtype.name})"
            for name, stored in self._files.items()
            if stored.dtype is not None and stored.dtype not in allowed
        ]
        if wrong:
            raise CheckpointError(
                f"{name_some(wrong)}: expected one of {', '.join(WEIGHT_DTYPES)} (a "
                "quantised file needs its quantization_config; name another "
                "--dtype for float64)"
            )

    def dtype(self, name: str, keep_float32: bool = False) -> np.dtype | None:
        """The dtype `read` returns; None if the file is not there."""
        stored = self._packed.get(name, self._files.get(name)).dtype
        if stored is None or self._dtype is None:
            return stored
        return stored if keep_float32 and stored == np.float32 else self._dtype

    def read(self, name: str, keep_float32: bool = False) -> np.ndarray:
        """A whole tensor; a view of the file where nothing has to be computed."""
        dtype = self.dtype(name, keep_float32)
        if name in self._packed:
            return self._packed[name].read(dtype)
        return cast(self._files[name].tensor(), dtype)

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Reads a whole tensor into a C-contiguous array of any weight dtype."""
        if name in self._packed or self._files[name].dtype != out.dtype:
            np.copyto(out, cast(self.read(name), out.dtype))
        else:
            self._files[name].read_into(out)

    def read_expert(self, name: str, expert: int) -> np.ndarray:
        """Slice `expert` of a fused tensor [E, ...]."""
        dtype = self.dtype(name)
        if name in self._packed:
            return self._packed[name].read(dtype, expert)
        return cast(self._files[name].tensor()[expert], dtype)

    def why_not_kept(self, name: str, kind: str) -> str | None:
        """Why a weight cannot be blocks of a kind as it is stored; None: it can."""
        if name not in self._packed:
            dtype = self._files[name].dtype
            return f"it is {'not there' if dtype is None else dtype.name}"
        return self._packed[name].why_not_kept(kind)

    def blocks(self, name: str, kind: str, expert: int | None = None) -> np.ndarray:
        """Rows of blocks of a weight that can be kept, or of one expert of it."""
        return self._packed[name].blocks(kind, expert)

    def release(self) -> None:
        """Drops the pages of every file from this process."""
        for file in self._open:
            file.release()

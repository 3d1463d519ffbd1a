"""The tensors of an HF folder under their plain names, dequantised and cast.

Hides shards, FP8 scales and MXFP4 packing: what is asked for by name comes as an
array of the wanted dtype. Names that no model uses (rotary buffers, multi-token
prediction layers, a tied model's copy of the embedding) are set aside and reported.
"""

from pathlib import Path

import numpy as np

from moe_edge.checkpoint.dtypes import BFLOAT16, WEIGHT_DTYPES, cast
from moe_edge.checkpoint.schema import Shapes, name_some
from moe_edge.convert import quantize, rules
from moe_edge.convert.hf_tensors import EMBED, HEAD, named_tensors
from moe_edge.core.checks import CheckpointError, ConfigError
from moe_edge.model.config import ModelConfig

_ROWS = 4096  # of two tensors that are compared together


class TensorSource:
    """Reads logical tensors of one folder.

    Attributes:
      shapes: published name -> shape.
      dropped: names, as in the files, set aside because the model does not use them.
      untied: whether a head in the file differs from the embedding although the config
        ties them; the model uses it then, as in transformers.
      method: None, "fp8" or "mxfp4".
    """

    def __init__(self, folder: Path, config: ModelConfig, dtype: np.dtype | None):
        self.method, self._block = quantize.quantization(config.hf_config)
        if self.method == "mxfp4" and not rules.has_columns(config):
            raise ConfigError(
                "quantization_config has quant_method 'mxfp4', whose layout is known "
                f"only of gpt_oss, got {config.model_type}; convert from an "
                "unquantised copy of the model"
            )
        self._files, self.dropped = named_tensors(folder, config)
        self._dtype = dtype
        self.shapes: Shapes = {}
        self._packed: set[str] = set()
        self._collect()
        if self.method is not None and not self._packed:
            raise CheckpointError(
                f"{folder}: config.json has a quantization_config of {self.method}, "
                f"but no tensor is {self.method} with its scales; remove it if the "
                "weights are not quantised, else copy the folder again"
            )
        self.untied = False
        if config.tie_embeddings and {EMBED, HEAD} <= self.shapes.keys():
            self.untied = not self._are_equal(EMBED, HEAD)
            if not self.untied:
                self.dropped.append(self._files.pop(HEAD).name)
                del self.shapes[HEAD]

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
        return sorted({stored.file.path for stored in self._files.values()})

    def _collect(self) -> None:
        """Fills `shapes`, joining quantised tensors with their scales."""
        scales = set()
        for name, stored in self._files.items():
            dtype, shape = stored.dtype, stored.shape
            if self.method == "fp8" and dtype in quantize.FP8_DTYPES:
                scale = name + quantize.SCALE
                if scale not in self._files:
                    raise CheckpointError(f"FP8 tensor {name} lacks its {scale}")
                quantize.check_fp8(name, shape, self._files[scale].shape, self._block)
                scales.add(scale)
                self._packed.add(name)
                self.shapes[name] = shape
            elif self.method == "mxfp4" and name.endswith(quantize.BLOCKS):
                base = name.removesuffix(quantize.BLOCKS)
                scale = base + quantize.SCALES
                if scale not in self._files or base in self._files:
                    raise CheckpointError(
                        f"{name} needs exactly {scale} next to it, and no {base}"
                    )
                quantize.check_mxfp4(base, shape, self._files[scale].shape)
                scales.add(scale)
                self._packed.add(base)
                E, rows, groups, width = shape
                self.shapes[base] = (E, groups * width * 2, rows)
            else:
                self.shapes[name] = shape
        for scale in scales:
            self.shapes.pop(scale, None)

    def check_dtypes(self) -> None:
        """Refuses tensors that hold no weights (integers, bytes, unscaled FP8)."""
        allowed = set(WEIGHT_DTYPES.values())
        if self._dtype is not None:
            allowed.add(np.dtype(np.float64))
        wrong = [
            f"{name} ({self._files[name].dtype.name})"
            for name in self.shapes
            if name not in self._packed and self._files[name].dtype not in allowed
        ]
        if wrong:
            raise CheckpointError(
                f"{name_some(wrong)}: expected one of {', '.join(WEIGHT_DTYPES)} (an "
                "FP8 or MXFP4 file needs its quantization_config; name another "
                "--dtype for float64)"
            )

    def dtype(self, name: str, keep_float32: bool = False) -> np.dtype:
        """The dtype `read` returns."""
        stored = BFLOAT16 if name in self._packed else self._files[name].dtype
        if self._dtype is None or (keep_float32 and stored == np.float32):
            return stored
        return self._dtype

    def read(self, name: str, keep_float32: bool = False) -> np.ndarray:
        """A whole tensor; a view of the file where nothing has to be computed."""
        dtype = self.dtype(name, keep_float32)
        if name not in self._packed:
            return cast(self._files[name].tensor(), dtype)
        if len(self.shapes[name]) == 3:
            experts = range(self.shapes[name][0])
            return np.stack([self.read_expert(name, e) for e in experts])
        scales = self._files[name + quantize.SCALE].tensor()
        weight = self._files[name].tensor()
        return quantize.dequantize_fp8(weight, scales, self._block, dtype)

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Reads a whole tensor into a C-contiguous array of any weight dtype."""
        if name in self._packed or self._files[name].dtype != out.dtype:
            np.copyto(out, cast(self.read(name), out.dtype))
        else:
            self._files[name].read_into(out)

    def read_expert(self, name: str, expert: int) -> np.ndarray:
        """Slice `expert` of a fused tensor [E, ...]."""
        dtype = self.dtype(name)
        if name not in self._packed:
            return cast(self._files[name].tensor()[expert], dtype)
        if self.method == "fp8":
            weight = self._files[name].tensor()[expert]
            scales = self._files[name + quantize.SCALE].tensor()[expert]
            return quantize.dequantize_fp8(weight, scales, self._block, dtype)
        blocks, scales = name + quantize.BLOCKS, name + quantize.SCALES
        return quantize.dequantize_mxfp4(
            self._files[blocks].tensor()[expert],
            self._files[scales].tensor()[expert],
            dtype,
        ).T

    def release(self) -> None:
        """Drops the pages of every file from this process."""
        for file in {stored.file for stored in self._files.values()}:
            file.release()

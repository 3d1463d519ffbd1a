"""The tensors of an HF folder under their plain names, dequantised and cast.

Hides shards, FP8 scales and MXFP4 packing: what is asked for by name comes as an
array of the wanted dtype. Names that no model uses (rotary buffers, multi-token
prediction layers, the head of a tied model) are set aside and reported.
"""

import re
from pathlib import Path

import numpy as np

from moe_edge.checkpoint.dtypes import BFLOAT16, WEIGHT_DTYPES, cast
from moe_edge.checkpoint.schema import Shapes, name_some
from moe_edge.convert import quantize
from moe_edge.convert.rules import TOP
from moe_edge.convert.safetensors_reader import open_folder
from moe_edge.core.checks import CheckpointError
from moe_edge.model.config import ModelConfig

_LAYER_ID = re.compile(r"model\.layers\.(\d{1,9})\.")


class TensorSource:
    """Reads logical tensors of one folder.

    Attributes:
      shapes: logical name -> shape.
      dropped: names set aside because the model does not use them.
      method: None, "fp8" or "mxfp4".
    """

    def __init__(self, folder: Path, config: ModelConfig, dtype: np.dtype | None):
        self.method, self._block = quantize.quantization(config.hf_config)
        self._files = open_folder(folder)
        self._dtype = dtype
        self.dropped = [name for name in self._files if _is_unused(name, config)]
        for name in self.dropped:  # its file stays open for its other tensors
            del self._files[name]
        self.shapes: Shapes = {}
        self._packed: set[str] = set()
        self._collect()

    @property
    def files(self) -> list[Path]:
        """Those that hold a tensor."""
        return sorted({file.path for file in self._files.values()})

    def _entry(self, name: str) -> tuple:
        return self._files[name].entries[name]

    def _collect(self) -> None:
        """Fills `shapes`, joining quantised tensors with their scales."""
        scales = set()
        for name in self._files:
            dtype, shape, _ = self._entry(name)
            if self.method == "fp8" and dtype in quantize.FP8_DTYPES:
                scale = name + quantize.SCALE
                if scale not in self._files:
                    raise CheckpointError(f"FP8 tensor {name} lacks its {scale}")
                quantize.check_fp8(name, shape, self._entry(scale)[1], self._block)
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
                quantize.check_mxfp4(base, shape, self._entry(scale)[1])
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
            f"{name} ({self._entry(name)[0].name})"
            for name in self.shapes
            if name not in self._packed and self._entry(name)[0] not in allowed
        ]
        if wrong:
            raise CheckpointError(
                f"{name_some(wrong)}: expected one of {', '.join(WEIGHT_DTYPES)} (an "
                "FP8 or MXFP4 file needs its quantization_config; name another "
                "--dtype for float64)"
            )

    def dtype(self, name: str, keep_float32: bool = False) -> np.dtype:
        """The dtype `read` returns."""
        stored = BFLOAT16 if name in self._packed else self._entry(name)[0]
        if self._dtype is None or (keep_float32 and stored == np.float32):
            return stored
        return self._dtype

    def read(self, name: str, keep_float32: bool = False) -> np.ndarray:
        """A whole tensor; a view of the file where nothing has to be computed."""
        dtype = self.dtype(name, keep_float32)
        if name in self._packed and self.method == "mxfp4":
            experts = range(self.shapes[name][0])
            return np.stack([self.read_expert(name, e) for e in experts])
        array = self._files[name].tensor(name)
        if name in self._packed:
            scale = name + quantize.SCALE
            scales = self._files[scale].tensor(scale)
            return quantize.dequantize_fp8(array, scales, self._block, dtype)
        return cast(array, dtype)

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Reads a whole tensor into a C-contiguous array of any weight dtype."""
        if name in self._packed or self._entry(name)[0] != out.dtype:
            np.copyto(out, cast(self.read(name), out.dtype))
        else:
            self._files[name].read_into(name, out)

    def read_expert(self, name: str, expert: int) -> np.ndarray:
        """Slice `expert` of a fused tensor [E, ...]."""
        dtype = self.dtype(name)
        if name not in self._packed:
            return cast(self._files[name].tensor(name)[expert], dtype)
        blocks, scales = name + quantize.BLOCKS, name + quantize.SCALES
        return quantize.dequantize_mxfp4(
            self._files[blocks].tensor(blocks)[expert],
            self._files[scales].tensor(scales)[expert],
            dtype,
        ).T

    def release(self) -> None:
        """Drops the pages of every file from this process."""
        for file in set(self._files.values()):
            file.release()


def _is_unused(name: str, config: ModelConfig) -> bool:
    """Whether a tensor of the file belongs to nothing that the model computes."""
    if name.endswith("rotary_emb.inv_freq"):
        return True
    if config.tie_embeddings and name == TOP["head"]:
        return True
    match = _LAYER_ID.match(name)
    if match is None or config.model_type not in ("deepseek_v3", "kimi_k2"):
        return False
    # Multi-token prediction modules are stored as layers behind the last one.
    raw = config.hf_config
    extra = raw.get("num_nextn_predict_layers", raw.get("num_mtp_layers")) or 1
    return 0 <= int(match[1]) - config.num_layers < extra

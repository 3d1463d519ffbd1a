"""The expert record: one expert block as one flat, contiguous row.

A row holds `gate [F, D] | up [F, D] | down [D, F] | biases`, each row-major in
Hugging Face's own `[out, in]` layout, and is padded to a multiple of 64 bytes (of 32
elements, which are 2 or 4 bytes wide). The same row is the unit of files, transfers,
cache slots and of the kernels' argument `experts_ER`; parts are static slices of it.

A quantised record (`kind`, `quantised.py`) is a row of bytes: an element is a byte.
Its matrices are rows of blocks along the input axis, so D and F are multiples of 32
(fp8: of 128), and there is no padding between them. Its biases are float32: they are a
thousandth of the bytes, and are added, not multiplied.
"""

import dataclasses
import math

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.model.config import ModelConfig
from moe_edge.model.quantised import (
    EIGHT,
    block_of,
    decode,
    interleave,
    row_bytes,
    scales,
    stored_shape,
)
from moe_edge.model.quantising import encode

ALIGN_ELEMENTS = 32
ALIGN_BYTES = 64
_STRIP = 1 << 16  # weights


def _strip_rows(shape: tuple[int, ...]) -> int:
    """Rows, in whole eights, that are encoded while a processor's cache holds them."""
    return EIGHT * max(1, _STRIP // (EIGHT * math.prod(shape[1:])))


@dataclasses.dataclass(frozen=True)
class RecordLayout:
    """Where the parts of an expert stand inside its record.

    Attributes:
      d_model: D.
      expert_dim: F.
      has_bias: whether gate, up `[F]` and down `[D]` biases follow the matrices.
      kind: of a quantised record, one of `quantised.STORED_KINDS`; None: numbers of one
        dtype.
      int8: whether kernels of few vectors round what they multiply by 8 bits.
    Raises:
      ConfigError: sizes that the blocks of a kind do not fill.
    """

    d_model: int
    expert_dim: int
    has_bias: bool = False
    kind: str | None = None
    int8: bool = False

    def __post_init__(self):
        for name, size in (("width", self.d_model), ("neurons", self.expert_dim)):
            block = 1 if self.kind is None else block_of(self.kind)
            if size % block:
                raise ConfigError(
                    f"experts with {size} {name} cannot be {self.kind}, whose blocks "
                    f"hold {block} weights: {size} is no multiple of {block}; keep "
                    "them in floats"
                )

    @classmethod
    def of(cls, config: ModelConfig) -> "RecordLayout":
        moe = config.moe
        sizes = config.d_model, moe.expert_dim, moe.expert_bias, moe.expert_kind
        return cls(*sizes, int8=config.activations == "int8")

    @property
    def unquantised(self) -> "RecordLayout":
        """The layout of the same expert in numbers of one dtype."""
        return dataclasses.replace(self, kind=None)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Part name -> shape, in the order of the record."""
        D, F = self.d_model, self.expert_dim
        shapes = {"gate": (F, D), "up": (F, D), "down": (D, F)}
        if self.has_bias:
            shapes |= {"gate_bias": (F,), "up_bias": (F,), "down_bias": (D,)}
        return shapes

    def count(self, shape: tuple[int, ...]) -> int:
        """Elements of the record that weights or biases of a shape take."""
        if self.kind is None:
            return math.prod(shape)
        if len(shape) == 1:
            return 4 * shape[0]
        return shape[0] * row_bytes(self.kind, shape[1])

    @property
    def offsets(self) -> dict[str, int]:
        """Part name -> first element inside the record."""
        offsets, start = {}, 0
        for name, shape in self.shapes.items():
            offsets[name] = start
            start += self.count(shape)
        return offsets

    @property
    def num_values(self) -> int:
        """Elements of a record without padding."""
        return sum(self.count(shape) for shape in self.shapes.values())

    @property
    def size(self) -> int:
        """R: elements of a record with padding."""
        align = ALIGN_ELEMENTS if self.kind is None else ALIGN_BYTES
        return -(-self.num_values // align) * align

    def num_bytes(self, dtype) -> int:
        """Bytes of a record of `dtype`: of a file, a slot, a transfer.

        Args:
          dtype: of the elements; uint8 of a quantised record.
        """
        return self.size * np.dtype(dtype).itemsize

    def check_dtype(self, dtype) -> None:
        """Raises ConfigError where records of `dtype` cannot be of this layout."""
        if (self.kind is None) == (dtype == np.uint8):
            raise ConfigError(
                f"records of {dtype} with a layout of kind {self.kind}; those in "
                "floats have none, quantised ones are uint8"
            )

    def value_dtype(self, dtype) -> np.dtype:
        """The dtype of what `part` gives of records of `dtype`."""
        return np.dtype(dtype if self.kind is None else np.float32)

    def part(self, record_R, name: str):
        """One part of a record, or of a stack of records `[..., R]`.

        A view; of a quantised record a copy, decoded to float32.
        """
        start, shape = self.offsets[name], self.shapes[name]
        return self.values(record_R[..., start : start + self.count(shape)], shape)

    def values(self, flat, shape: tuple[int, ...]):
        """Neighbouring elements `[..., count(shape)]` of records in their shape."""
        lead = flat.shape[:-1]
        if self.kind is None:
            return flat.reshape(*lead, *shape)
        if len(shape) == 1:
            return flat.view(np.float32)
        return decode(self.kind, flat.reshape(*lead, *stored_shape(self.kind, shape)))

    def numbers(self, records_ER: np.ndarray):
        """Arrays that are finite where the weights of records are: the records, or of
        quantised ones their scales and biases."""
        if self.kind is None:
            yield records_ER
            return
        for name, shape in self.shapes.items():
            start = self.offsets[name]
            flat = records_ER[..., start : start + self.count(shape)]
            yield (
                self.values(flat, shape) if len(shape) == 1 else scales(self.kind, flat)
            )

    def interleaved(self, record_R: np.ndarray) -> np.ndarray:
        """The record with rows in eights of one whose rows are apart."""
        found_R = record_R.copy()
        for name, shape in self.shapes.items():
            if len(shape) == 2:
                part = slice(start := self.offsets[name], start + self.count(shape))
                rows = record_R[part].reshape(stored_shape(self.kind, shape))
                found_R[part] = interleave(self.kind, rows).reshape(-1)
        return found_R

    def decoded(self, record_R: np.ndarray) -> np.ndarray:
        """The float32 record (`unquantised`) that a quantised one means."""
        plain = self.unquantised
        values_R = np.zeros(plain.size, np.float32)
        for name in self.shapes:
            plain.part(values_R, name)[:] = self.part(record_R, name)
        return values_R

    def encode(self, values_R: np.ndarray) -> np.ndarray:
        """A quantised record, uint8 `[R]`, of one in numbers (`unquantised`).

        Of what float16 scales cannot hold, `part` gives infinity or NaN.
        """
        record_R, plain = np.zeros(self.size, np.uint8), self.unquantised
        for name, shape in self.shapes.items():
            values, start = plain.part(values_R, name), self.offsets[name]
            for first in range(0, shape[0], step := _strip_rows(shape)):
                some = values[first : first + step].astype(np.float32)
                is_bias = len(shape) == 1
                stored = some.view(np.uint8) if is_bias else encode(self.kind, some)
                record_R[start : start + stored.size] = stored.reshape(-1)
                start += stored.size
        return record_R

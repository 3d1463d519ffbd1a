"""Readers that change how experts are held: floats -> quantised blocks, and back.

Each stands for another reader, so that hashing and writing need to know of neither.
"""

from typing import Any

import numpy as np

from moe_edge.checkpoint.dtypes import all_finite, cast
from moe_edge.checkpoint.manifest import with_kind
from moe_edge.core.checks import CheckpointError
from moe_edge.model.record import RecordLayout


class _Instead:
    """All of another reader but its experts."""

    def __init__(self, reader, kind: str | None, dtype: np.dtype):
        self._inner = reader
        self.config = with_kind(reader.config, kind or dtype.name)
        self.layout, self.dtype = RecordLayout.of(self.config), dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read_experts(self, layer: int, first: int, out_NR: np.ndarray) -> None:
        """As of the inner reader; a record at a time, as float32 ones are large."""
        inner = self._inner
        record_1R = np.empty((1, inner.layout.size), inner.dtype)
        for i, out_R in enumerate(out_NR):
            inner.read_experts(layer, first + i, record_1R)
            self._change(record_1R[0], out_R, f"layer {layer}, expert {first + i}")

    def _change(self, record_R: np.ndarray, out_R: np.ndarray, where: str) -> None:
        raise NotImplementedError


class Quantised(_Instead):
    """A checkpoint of floats whose experts are read quantised.

    Args:
      reader: of either format.
      kind: one of `quantised.KINDS`.
    Raises:
      ConfigError: D or F that the kind's blocks do not fill.
    """

    def __init__(self, reader, kind: str):
        super().__init__(reader, kind, np.dtype(np.uint8))

    def _change(self, record_R, out_R, where):
        if not all_finite(record_R):
            raise CheckpointError(
                f"{where} has NaN or infinite weights, which {self.layout.kind} cannot "
                "hold; leave --expert_dtype out to keep them"
            )
        out_R[:] = self.layout.encode(record_R)


class Dequantised(_Instead):
    """A quantised checkpoint of ours whose experts are read as numbers.

    Args:
      reader: of our format.
      dtype: of the numbers; None: float32, which holds them exactly.
    Attributes:
      kind: of what it reads.
    """

    def __init__(self, reader, dtype: np.dtype | None = None):
        super().__init__(reader, None, dtype or np.dtype(np.float32))
        self.kind = reader.layout.kind

    def _change(self, record_R, out_R, where):
        out_R[self.layout.num_values :] = 0
        for name in self.layout.shapes:
            values = self._inner.layout.part(record_R, name)
            np.copyto(self.layout.part(out_R, name), cast(values, self.dtype))

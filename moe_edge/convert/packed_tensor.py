"""A weight that stands in several tensors of a file, and is dequantised when read."""

import abc
from collections.abc import Iterator

import numpy as np

from moe_edge.checkpoint.dtypes import BFLOAT16
from moe_edge.convert.hf_tensors import Stored
from moe_edge.core.checks import CheckpointError

FLOATS = (np.dtype(np.float32), BFLOAT16, np.dtype(np.float16))
_STRIP = 1 << 20  # weights that are dequantised together, as float32


class PackedTensor(abc.ABC):
    """One weight of the model.

    Attributes:
      name: as of the weight in an unquantised folder.
      parts: role -> tensor of the file.
      shape: of the weight; None if a part's file is not there.
      dtype: of what is read, unless it is cast to another.
    Raises:
      CheckpointError: parts that do not belong together.
    """

    dtype = BFLOAT16

    def __init__(self, name: str, parts: dict[str, Stored]):
        self.name, self.parts = name, parts
        known = None not in [part.file for part in parts.values()]
        self.shape: tuple[int, ...] | None = self._checked_shape() if known else None

    @abc.abstractmethod
    def _checked_shape(self) -> tuple[int, ...]:
        """The weight's shape, once the parts' shapes and dtypes are checked."""

    @abc.abstractmethod
    def read(self, dtype: np.dtype, expert: int | None = None) -> np.ndarray:
        """The weight, computed in float32 and rounded once.

        Args:
          expert: of a weight [E, ..]; the result is then this expert's alone.
        """

    def why_not_kept(self, kind: str) -> str | None:
        """Why it cannot be blocks of a kind with the very codes and scales; None: it
        can."""
        return f"its codes are none of {kind}"

    def blocks(self, kind: str, expert: int | None = None) -> np.ndarray:
        """uint8 rows of blocks (`model/quantised.py`), if it can be kept."""
        raise NotImplementedError

    def _array(self, role: str, expert: int | None = None) -> np.ndarray:
        """A part as it is stored."""
        array = self.parts[role].tensor()
        return array if expert is None else array[expert]

    def _check(
        self, role: str, shape: tuple[int, ...], dtypes: tuple[np.dtype, ...] = ()
    ) -> None:
        """Refuses a part of another shape or of none of the dtypes (empty: any)."""
        part = self.parts[role]
        if part.shape != shape:
            raise CheckpointError(
                f"{part.name} has shape {part.shape}, expected {shape} next to "
                f"the other tensors of {self.name}; copy the file again"
            )
        if dtypes and part.dtype not in dtypes:
            raise CheckpointError(
                f"{part.name} is {part.dtype.name}, expected "
                f"{' or '.join(dtype.name for dtype in dtypes)}; copy the file again"
            )


def strips(rows: int, cols: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Ranges of rows that are dequantised together.

    Args:
      multiple: where every range begins at one of these.
    """
    step = max(1, _STRIP // max(cols, 1) // multiple) * multiple
    for first in range(0, rows, step):
        yield first, min(rows, first + step)


def rounded(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float32 values in `dtype`; what it cannot hold becomes infinity."""
    with np.errstate(over="ignore", under="ignore"):
        return values.astype(dtype)

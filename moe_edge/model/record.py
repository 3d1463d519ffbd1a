"""The expert record: one expert block as one flat, contiguous row.

A row holds `gate [F, D] | up [F, D] | down [D, F] | biases`, each row-major in
Hugging Face's own `[out, in]` layout, and is padded to a multiple of 32 elements
so that every record is 64-byte aligned in 2- and 4-byte dtypes alike. The same
row is the unit of files, transfers, cache slots and of the kernels' argument
`experts_ER`; parts are static slices of it.
"""

import dataclasses
import math

from moe_edge.model.config import ModelConfig

ALIGN_ELEMENTS = 32


@dataclasses.dataclass(frozen=True)
class RecordLayout:
    """Where the parts of an expert stand inside its record.

    Attributes:
      d_model: D.
      expert_dim: F.
      has_bias: whether gate, up `[F]` and down `[D]` biases follow the matrices.
    """

    d_model: int
    expert_dim: int
    has_bias: bool = False

    @classmethod
    def of(cls, config: ModelConfig) -> "RecordLayout":
        return cls(config.d_model, config.moe.expert_dim, config.moe.expert_bias)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Part name -> shape, in the order of the record."""
        D, F = self.d_model, self.expert_dim
        shapes = {"gate": (F, D), "up": (F, D), "down": (D, F)}
        if self.has_bias:
            shapes |= {"gate_bias": (F,), "up_bias": (F,), "down_bias": (D,)}
        return shapes

    @property
    def offsets(self) -> dict[str, int]:
        """Part name -> first element inside the record."""
        offsets, start = {}, 0
        for name, shape in self.shapes.items():
            offsets[name] = start
            start += math.prod(shape)
        return offsets

    @property
    def num_values(self) -> int:
        """Elements of a record without padding."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def size(self) -> int:
        """R: elements of a record with padding."""
        return -(-self.num_values // ALIGN_ELEMENTS) * ALIGN_ELEMENTS

    def part(self, record_R, name: str):
        """View of one part of a record, or of a stack of records `[..., R]`."""
        start, shape = self.offsets[name], self.shapes[name]
        flat = record_R[..., start : start + math.prod(shape)]
        return flat.reshape(*record_R.shape[:-1], *shape)

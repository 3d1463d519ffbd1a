"""What the tests of predictors share."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """Stands in for the cache's spec."""

    num_layers: int
    num_experts: int
    top_k: int


def rows_of(prediction) -> list[list[int]]:
    """Ids of each row without padding."""
    return [[i for i in row if i >= 0] for row in prediction[0].tolist()]

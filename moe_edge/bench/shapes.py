"""What an entry says of a model of which only the shape took part."""

from typing import Any

from moe_edge.hardware.models import ModelShape


def shape_entry(*shapes: ModelShape) -> dict[str, Any]:
    """`model` of an entry: only shapes took part; params are of a token's layers."""
    params = {
        shape.name: int(
            shape.num_blocks * shape.block.flops(1) / 2
            + shape.num_layers * shape.dense.flops_per_token / 2
        )
        for shape in shapes
    }
    return {
        "name": ", ".join(params),
        "params": params if len(params) > 1 else next(iter(params.values())),
        "weights": "none: shapes only, routing generated",
    }

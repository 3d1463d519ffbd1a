"""Which dense tensors a model has, by canonical name, and their shapes.

One place that both checkpoint formats are checked against: a tensor is missing,
extra or of the wrong shape exactly when it disagrees with these tables.
"""

from collections.abc import Mapping
from typing import NamedTuple

from moe_edge.core.checks import CheckpointError
from moe_edge.model.config import ModelConfig
from moe_edge.model.shapes import Shapes, kept_shapes, layer_shapes, norm_shapes

# What is stored and read together: a layer's dense tensors by its id, or a name.
# The head is apart from the rest of the top because both can be very large.
Item = int | str
TOP_ITEMS = ("top", "head")


def dense_items(config: ModelConfig) -> list[Item]:
    """Every item of a model, in the order of the forward pass but the head."""
    tops = TOP_ITEMS[:1] if config.tie_embeddings else TOP_ITEMS
    return [*tops, *range(config.num_layers)]


def item_shapes(config: ModelConfig, item: Item) -> Shapes:
    """Canonical name -> shape of the dense tensors of one item."""
    V, D = config.vocab_size, config.d_model
    if item == "top":
        shapes = {"embed": (V, D)} | norm_shapes(config, "final_norm")
        return shapes | ({"head_bias": (V,)} if config.head_bias else {})
    if item == "head":
        return {"head": (V, D)}
    return layer_shapes(config, int(item)) | kept_shapes(config, int(item))


def name_some(names, limit: int = 8) -> str:
    """Up to `limit` names and how many more there are."""
    names = list(names)
    shown = ", ".join(names[:limit])
    return (
        shown if len(names) <= limit else f"{shown} ... and {len(names) - limit} more"
    )


class Differences(NamedTuple):
    """What tensors of a file and those that a config asks for have not in common."""

    missing: list[str]
    unexpected: list[str]
    wrong: list[str]  # with the shape in the file and the one expected

    def check(self, where: str) -> None:
        """Raises CheckpointError naming the first few of each kind, if there are any.

        Args:
          where: what is being read, for the message.
        """
        problems = [f"missing {name_some(self.missing)}"] if self.missing else []
        if self.unexpected:
            problems.append(f"unexpected {name_some(self.unexpected)}")
        if self.wrong:
            problems.append(name_some(self.wrong))
        if problems:
            raise CheckpointError(
                f"{where} does not fit its config: {'; '.join(problems)}; use the "
                "files that belong to this config"
            )


def differences(found: Mapping, expected: Shapes) -> Differences:
    """Compares names and shapes, both ways.

    Args:
      found: name -> shape in the file; None: it is not known.
      expected: name -> shape that the config asks for.
    """
    return Differences(
        [name for name in expected if name not in found],
        [name for name in found if name not in expected],
        [
            f"{name} has shape {tuple(found[name])}, expected {tuple(shape)}"
            for name, shape in expected.items()
            if found.get(name) is not None and tuple(found[name]) != tuple(shape)
        ],
    )


def check_tensors(where: str, found: Shapes, expected: Shapes) -> None:
    """Raises CheckpointError where names or shapes differ; see `differences`.

    Args:
      where: what is being read, for the message.
    """
    differences(found, expected).check(where)

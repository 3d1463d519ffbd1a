"""Which dense tensors a model has, by canonical name, and their shapes.

One place that both checkpoint formats are checked against: a tensor is missing,
extra or of the wrong shape exactly when it disagrees with these tables.
"""

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


def check_tensors(where: str, found: Shapes, expected: Shapes) -> None:
    """Compares names and shapes, both ways.

    Args:
      where: what is being read, for the message.
      found: name -> shape in the file.
      expected: name -> shape that the config asks for.
    Raises:
      CheckpointError: names the missing and unexpected tensors, or the first few of
        wrong shape.
    """
    problems = []
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    if missing:
        problems.append(f"missing {name_some(missing)}")
    if extra:
        problems.append(f"unexpected {name_some(extra)}")
    wrong = [
        f"{name} has shape {tuple(found[name])}, expected {tuple(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    if wrong:
        problems.append(name_some(wrong))
    if problems:
        raise CheckpointError(
            f"{where} does not fit its config: {'; '.join(problems)}; use the files "
            "that belong to this config"
        )

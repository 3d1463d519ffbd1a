"""The model that statistics were counted on: sizes of its blocks, and its layers."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

from moe_edge.core.checks import ConfigError
from moe_edge.hardware.cost_model import BlockShape
from moe_edge.hardware.models import MODELS, model_shape

PRESETS = {  # by the names in published statistics
    "Mixtral-8x7B-v0.1": "mixtral_8x7b",
    "OLMoE-1B-7B-0924": "olmoe_1b_7b",
}


@dataclasses.dataclass(frozen=True)
class CountedModel:
    """What placement asks of a model.

    Attributes:
      name: in the statistics.
      block: one expert block.
      source: where the sizes come from.
      layers: numbers of its layers with routed experts; None: not known.
      num_experts: of a layer; None: not known.
    """

    name: str
    block: BlockShape
    source: str
    layers: Sequence[int] | None = None
    num_experts: int | None = None

    def check(self, layers: Sequence[int], num_experts: int, path: str | Path) -> None:
        """Refuses statistics that cannot be of this model, or lack one of its layers.

        Statistics may count a sample of the layers. In a sample no two layers are
        neighbours; where two are, all layers were counted, and one that is not there
        is missing.

        Raises:
          ConfigError: naming what contradicts the model.
        """
        if self.num_experts not in (None, num_experts):
            raise ConfigError(
                f"{path} counts {num_experts} experts a layer, but {self.name} has "
                f"{self.num_experts} ({self.source}); name its model or checkpoint"
            )
        known = self.layers
        if known is None:
            known = range(min(layers), max(layers) + 1)
        if strange := sorted(set(layers) - set(known)):
            raise ConfigError(
                f"{path} counts layers {strange}, but {self.name} has routed experts "
                f"in layers {min(known)} to {max(known)} only ({self.source})"
            )
        missing = sorted(set(known) - set(layers))
        if missing and any(b - a == 1 for a, b in itertools.pairwise(layers)):
            raise ConfigError(
                f"{path} lacks layers {missing} of {self.name}; count every layer, or "
                "a sample in which no two layers are neighbours"
            )

    def coverage(self, layers: Sequence[int]) -> str:
        """How much of the model was counted, in words; empty for all of it."""
        if self.layers is None or len(layers) == len(self.layers):
            return ""
        return f"{len(layers)} of {len(self.layers)} layers were counted and are placed"


def counted_model(
    name: str,
    checkpoint: str | None = None,
    d_model: int | None = None,
    expert_dim: int | None = None,
) -> CountedModel:
    """The model behind a name in statistics.

    Args:
      name: a published name, a preset, or the checkpoint that was profiled.
      checkpoint: whose sizes to take; None: what `name` says.
      d_model, expert_dim: the sizes themselves, in bfloat16.
    Raises:
      ConfigError: no sizes are known, or only half of them were given.
      CheckpointError: the checkpoint cannot be opened.
    """
    if (d_model is None) != (expert_dim is None):
        raise ConfigError(
            f"--d_model is {d_model}, --expert_dim is {expert_dim}; give both or none"
        )
    if d_model is not None and expert_dim is not None:
        if checkpoint is not None:
            raise ConfigError(
                "--checkpoint and --d_model name the sizes twice; give one"
            )
        return CountedModel(name, BlockShape(d_model, expert_dim, 2), "--d_model")
    preset = PRESETS.get(name, name)
    if checkpoint is None and preset in MODELS:
        shape = model_shape(preset)
        every = name in PRESETS  # of those every layer has routed experts
        layers = range(shape.num_layers) if every else None
        source = f"preset {preset}"
        return CountedModel(name, shape.block, source, layers, shape.num_experts)
    if checkpoint is None and name != "default" and not Path(name).exists():
        raise ConfigError(
            f"the sizes of model {name!r} are not known: name its checkpoint with "
            "--checkpoint, or give --d_model and --expert_dim; known: "
            f"{', '.join(sorted(PRESETS))}"
        )
    return _of_checkpoint(name, checkpoint or name)


def _of_checkpoint(name: str, path: str) -> CountedModel:
    # Only now: opening a checkpoint may load JAX.
    from moe_edge.convert.open import open_checkpoint

    reader = open_checkpoint(path)
    config, layout = reader.config, reader.layout
    stored_bytes = layout.num_bytes(reader.dtype)
    block = BlockShape(
        layout.d_model,
        layout.expert_dim,
        4,  # hidden states travel in float32
        bytes_per_weight=stored_bytes / (3 * layout.d_model * layout.expert_dim),
    )
    layers, experts = tuple(config.moe_layers), config.moe.num_experts
    return CountedModel(name, block, f"checkpoint {path}", layers, experts)

"""What a cluster asks of its checkpoint and placement, checked without JAX."""

import hashlib
from pathlib import Path

import numpy as np

from moe_edge.checkpoint.manifest import MANIFEST_NAME
from moe_edge.cluster.options import ClusterOptions
from moe_edge.cluster.slots import room_of, slots_of
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CapacityError, ConfigError, MoeEdgeError
from moe_edge.model.config import ModelConfig
from moe_edge.offload.slot_plan import MIN_SLOTS
from moe_edge.place.plan import Placement
from moe_edge.place.policy import ALONE


def check_model(options: ClusterOptions, reader) -> None:
    """Raises what the options and an open checkpoint have against each other.

    Raises:
      ConfigError: a placement that is of another cluster or cannot be read.
      CapacityError: too few slots.
    """
    config = reader.config
    if options.mode == "prism":
        slots = slots_of(options, len(config.moe_layers) * config.moe.num_experts)
        if options.serves_alone and min(slots) < MIN_SLOTS:
            raise CapacityError(
                f"a server with {min(slots)} slots cannot serve alone, which takes "
                f"{MIN_SLOTS}; give it more, or leave out --methods {', '.join(ALONE)}"
            )
        if options.placement is not None and options.is_scheduler:
            given_placement(options, config)


def given_placement(options: ClusterOptions, config: ModelConfig) -> Placement:
    """The placement that `--placement` names.

    Raises:
      ConfigError: it cannot be read, or is of another cluster or model.
      CapacityError: more blocks than slots, or a block that is nowhere.
    """
    stem, layers, experts = options.placement, config.moe_layers, config.moe.num_experts
    try:
        placement = Placement.load(stem)
    except MoeEdgeError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--placement {stem} cannot be read: {type(error).__name__}: {error}; "
            "expected the stem of a .npy and a .json of launch/place_experts.py"
        ) from error
    shape = options.servers, len(layers), experts
    if placement.gpu_NLE.shape != shape:
        raise ConfigError(
            f"--placement {stem} has (servers, layers, experts) "
            f"{placement.gpu_NLE.shape}, the cluster and the model ask for {shape}"
        )
    room_N = room_of(options, len(layers) * experts)
    placement.check([np.array([n]) for n in room_N])
    return placement


def checkpoint_mark(path: str) -> str:
    """What tells checkpoints apart: the stored hash, or one of sizes and beginnings."""
    reader = open_checkpoint(path)
    folder = Path(reader.path)
    if (folder / MANIFEST_NAME).is_file():
        return reader.content_sha256()
    mark = hashlib.sha256()
    for file in [folder] if folder.is_file() else sorted(folder.glob("*")):
        if file.suffix in (".json", ".safetensors", ".gguf"):
            with file.open("rb") as opened:
                start = opened.read(1 << 20)
            mark.update(f"{file.name} {file.stat().st_size}\n".encode() + start)
    return mark.hexdigest()

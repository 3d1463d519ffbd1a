"""What servers that ask each other want of a model, checked without JAX."""

import numpy as np

from moe_edge.cluster.gpus import has_several, one_gpu_each
from moe_edge.cluster.prism_options import PrismOptions
from moe_edge.cluster.slots import room_of, slots_of
from moe_edge.core.checks import CapacityError, ConfigError, MoeEdgeError
from moe_edge.model.config import ModelConfig
from moe_edge.offload.budget import MIN_SLOTS
from moe_edge.place.placer import ALONE
from moe_edge.place.plan import Placement


def check(options: PrismOptions, config: ModelConfig) -> list[int] | None:
    """The GPU of each server, where a placement names it.

    Raises:
      ConfigError: a placement that is of another cluster or cannot be read.
      CapacityError: too few slots.
    """
    slots = slots_of(options, len(config.moe_layers) * config.moe.num_experts)
    if options.serves_alone and min(slots) < MIN_SLOTS:
        raise CapacityError(
            f"a server with {min(slots)} slots cannot serve alone, which takes "
            f"{MIN_SLOTS}; give it more, or leave out --methods {', '.join(ALONE)}"
        )
    if options.placement is not None and options.is_scheduler:
        return given_placement(options, config)[1]
    return None


def given_placement(
    options: PrismOptions, config: ModelConfig
) -> tuple[Placement, list[int] | None]:
    """The placement that `--placement` names, and the servers' GPUs if it names them.

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
            "expected the stem of a .npy and a .json of moe-edge place_experts"
        ) from error
    placement, gpus = one_gpu_each(placement, options.servers, has_several(options))
    shape = options.servers, len(layers), experts
    if placement.gpu_NLE.shape != shape:
        raise ConfigError(
            f"--placement {stem} has (servers, layers, experts) "
            f"{placement.gpu_NLE.shape}, the cluster and the model ask for {shape}"
        )
    room_N = room_of(options, len(layers) * experts)
    placement.check([np.array([n]) for n in room_N])
    return placement, gpus

"""What a cluster asks of its checkpoint, checked without JAX."""

from moe_edge.cluster.modes import mode_of
from moe_edge.cluster.options import ClusterOptions
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.tables import load
from moe_edge.engine.refusals import Asked, refuse
from moe_edge.model.sub_experts import at_k


def open_at_k(options: ClusterOptions):
    """The open checkpoint of a cluster, at its K and with its caches.

    Raises:
      CheckpointError: it cannot be read; ConfigError: a K that the model has
        not, or caches that its heads do not fill.
    """
    reader = open_checkpoint(options.checkpoint)
    reader.config = at_k(reader.config, options.k).with_cache(options.kv_cache)
    return reader


def check_model(options: ClusterOptions, reader) -> list[int] | None:
    """Raises what the options and an open checkpoint have against each other.

    Returns:
      The GPU of each server, where a placement names it.
    Raises:
      ConfigError: a placement that is of another cluster or cannot be read.
      CapacityError: too few slots.
    """
    refuse(Asked(model=reader.config, route=options.chosen_route))
    check = mode_of(options).check
    return None if check is None else load(check)(options, reader.config)

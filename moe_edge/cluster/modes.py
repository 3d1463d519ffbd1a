"""Ways to run a cluster: servers that ask each other, which is ours, or a paper's own.

A paper's table (core/tables.py) names a `Mode` under kind `mode`. It loads without JAX;
what its functions need is imported inside them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from moe_edge.cluster.options import ClusterOptions
from moe_edge.core.checks import ConfigError, check_known
from moe_edge.core.tables import load, plugins
from moe_edge.model.config import ModelConfig

SERVERS = "prism"
OWN = {SERVERS: "moe_edge.cluster.prism.mode:MODE"}


def _nothing(options: ClusterOptions, config: ModelConfig) -> None:
    """Where the options say all that can be wrong."""


class Mode(NamedTuple):
    """What a way to run a cluster consists of.

    Attributes:
      options: what a user says of it.
      make_node: (number, options, transport, reader) -> a process but the scheduler.
      programme: -> the class of what the scheduler does.
      check: (options, config) -> the GPU of each process, where the options name it;
        raises what options and model have against each other.
    """

    options: type[ClusterOptions]
    make_node: Callable[..., Any]
    programme: Callable[[], type]
    check: Callable[[Any, ModelConfig], list[int] | None] = _nothing


def modes() -> dict[str, Mode]:
    """By name, ours first."""
    return {name: load(place) for name, place in (OWN | plugins("mode")).items()}


def mode_of(options: ClusterOptions) -> Mode:
    """The mode whose options they are."""
    return modes()[options.mode]


def options_classes() -> dict[str, type[ClusterOptions]]:
    """Of all modes, by name, ours first."""
    return {name: mode.options for name, mode in modes().items()}


def options_of(**given) -> ClusterOptions:
    """The options of the mode that they name, or of ours.

    Raises:
      ConfigError: an unknown mode, an option of another one, or what cannot be.
    """
    classes, mode = options_classes(), given.get("mode", SERVERS)
    check_known("mode", mode, classes)
    names = {name: _names(kind) for name, kind in classes.items()}
    for option in sorted(given.keys() - names[mode]):
        for other in (name for name in names if option in names[name]):
            raise ConfigError(
                f"--{option} is an option of mode {other}, and the mode is {mode}; "
                f"leave it out, or give --mode {other}"
            )
    return classes[mode](**given)


def _names(kind: type[ClusterOptions]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}

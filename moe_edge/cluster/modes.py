"""Ways to run a cluster: servers that ask each other, which is ours, or a paper's own.

A paper's table (core/tables.py) names a `Mode` under kind `mode`. It loads without JAX.
"""

import dataclasses
from typing import NamedTuple

from moe_edge.cluster.options import ClusterOptions
from moe_edge.core.checks import ConfigError, check_known
from moe_edge.core.tables import load, plugins

SERVERS = "prism"
OWN = {SERVERS: "moe_edge.cluster.prism_options:MODE"}


class Mode(NamedTuple):
    """What a way to run a cluster consists of; `module:object` is imported when needed.

    Attributes:
      options: what a user says of it.
      node: makes a process but the scheduler, of (number, options, transport, reader).
      programme: the class of what the scheduler does.
      check: gives of (options, config) the GPU of each process, where the options name
        it; raises what options and model have against each other. None: options say it
        all.
    """

    options: type[ClusterOptions]
    node: str
    programme: str
    check: str | None = None


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

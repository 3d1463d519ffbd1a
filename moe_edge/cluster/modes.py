"""Ways to run a cluster: servers that ask each other, which is ours, or a paper's own.

A paper's table (core/tables.py) names a `Mode` under kind `mode`. It loads without JAX;
what its functions need is imported inside them.
"""

from collections.abc import Callable
from typing import NamedTuple

from moe_edge.core.tables import load, plugins

SERVERS = "prism"


class Mode(NamedTuple):
    """What a way to run a cluster consists of.

    Attributes:
      check: (options): raises ConfigError for what of this mode cannot be.
      make_node: (number, options, transport, reader) -> a process but the scheduler.
      programme: -> the class of what the scheduler does.
    """

    check: Callable[..., None]
    make_node: Callable[..., object]
    programme: Callable[[], type]


def modes() -> dict[str, Mode]:
    """Those of papers, by name."""
    return {name: load(place) for name, place in plugins("mode").items()}

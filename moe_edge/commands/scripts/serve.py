"""Serves a model to clients of OpenAI's API.

moe-edge serve --checkpoint default --port 8000
moe-edge serve --checkpoint R --port 8000 --device_memory 25%
moe-edge serve --checkpoint R --port 8000 --servers 3 --slots 150,150,200
"""

from moe_edge.commands import common


def main() -> None:
    """The command; never returns."""
    common.run("serve", __doc__)

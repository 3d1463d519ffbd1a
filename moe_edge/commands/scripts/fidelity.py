"""Measures how far lossy offloading is from the unmodified model: a fidelity card.

moe-edge fidelity --checkpoint DIR --text FILE --device_memory 25%
moe-edge fidelity --gin_file smoe
moe-edge fidelity --checkpoint QUANTISED
"""

from moe_edge.commands import common


def main() -> None:
    """The command; never returns."""
    common.run("fidelity", __doc__)

"""Sends requests at their times, and says how they were served.

moe-edge load --target http://127.0.0.1:8000 --poisson 8 --duration_s 60
moe-edge load --target engine --poisson 2 --floors 8:1,16:1,24:1,32:1
moe-edge load --target computed --costs machine.json --poisson 8
"""

from moe_edge.commands import common


def main() -> None:
    """The command; never returns."""
    common.run("load", __doc__)

"""Serves requests for a collaboration of many expert models (CoServe), and compares.

moe-edge coserve --graph G.json --requests R.jsonl \\
    --policies samba,coserve,affinity --out_dir DIR
moe-edge coserve --simulate numa --task a1 --out_dir DIR

Live on this machine; loads are emulated where there is no GPU. With --simulate all
times are computed: on a preset machine, or by the costs of a coe_profile.json.
"""

from moe_edge.commands import common


def main() -> None:
    """The command; never returns."""
    common.run("coserve", __doc__)

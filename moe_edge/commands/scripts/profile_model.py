"""Runs calibration text through a model and stores what its experts do with it.

moe-edge profile_model --checkpoint default --text FILE --out_dir P
moe-edge profile_model --text wikitext:a.txt,books:b.txt,books:c.txt --out_dir P
"""

from moe_edge.commands import common


def main() -> None:
    """The command; never returns."""
    common.run("profile_model", __doc__)

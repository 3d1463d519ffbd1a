"""Runs tasks of the lm-evaluation-harness (extra `eval`).

moe-edge lm_eval --tasks NAME --include_path FOLDER --checkpoint DIR
"""

from moe_edge.commands import common


def main() -> None:
    """The command; never returns."""
    common.run("lm_eval", __doc__)

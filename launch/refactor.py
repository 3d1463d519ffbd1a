"""`moe-edge refactor` from a clone: a command of MoE-Prism."""

from moe_edge.commands.main import run_file

if __name__ == "__main__":
    run_file(__file__)

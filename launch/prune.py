"""`moe-edge prune` from a clone: a file in moe_edge/commands/scripts/."""

from moe_edge.commands.main import run_file

if __name__ == "__main__":
    run_file(__file__)

"""`moe-edge coserve` from a clone: a command of CoServe."""

from moe_edge.commands.main import run_file

if __name__ == "__main__":
    run_file(__file__)

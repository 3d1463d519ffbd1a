"""Runs tasks of the lm-evaluation-harness (extra `eval`).

python launch/lm_eval.py --tasks NAME --include_path FOLDER --checkpoint DIR
"""

from launch import common

if __name__ == "__main__":
    common.run("lm_eval")

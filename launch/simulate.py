"""Simulates a cluster that serves one model, method by method.

python launch/simulate.py --gin_file configs/examples/prism_bigbench_deepseek.gin \\
    --out_dir DIR
"""

from launch import common

if __name__ == "__main__":
    common.run("simulate")

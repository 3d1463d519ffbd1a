"""Simulates a cluster that serves one model, method by method.

python launch/simulate.py --gin_file configs/examples/prism_bigbench_deepseek.gin \\
    --out_dir DIR
python launch/simulate.py --cluster_run RUN --out_dir DIR

The second form does a run of launch/cluster.py again in computed time.
"""

from launch import common

if __name__ == "__main__":
    common.run("simulate")

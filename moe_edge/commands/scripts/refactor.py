"""Refactors a model into one of sub-experts (MoE-Prism), or partitions one matrix.

python launch/refactor.py --checkpoint default --profile P --sub_experts 4 --gate lg
    --out_dir R
python launch/refactor.py --activations M.npy --sub_experts 4 --inactive 3 --out_dir D
"""

from launch import common

if __name__ == "__main__":
    common.run("refactor_model")

"""Trains the experts of a board of components (CoServe), or goes on with --out_dir.

python launch/train_board.py --types 40 --out_dir W
python launch/train_board.py --types 352 --trained_types 40 --out_dir W

About 10 s an expert on one core.
"""

from launch import common

if __name__ == "__main__":
    common.run("train_board")

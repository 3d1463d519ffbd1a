"""Replays a route trace through cache policies and predictors, without a model.

python launch/replay.py --trace T.csv.gz --slots_per_layer 13,32,64 --out_dir DIR
"""

from launch import common

if __name__ == "__main__":
    common.run("replay")

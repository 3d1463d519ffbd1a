"""Replays a route trace through cache policies and predictors, without a model.

python launch/replay.py --trace T.csv.gz --slots_per_layer 13,32,64 --out_dir DIR
"""

from absl import flags

from launch import common

FLAGS = (
    common.define_data_dir(),
    flags.DEFINE_string("trace", None, "route trace, CSV, gzip or plain"),
    flags.DEFINE_string("slots_per_layer", None, "cache sizes, separated by commas"),
    flags.DEFINE_string(
        "policies", None, "cache policies, by commas, or all (default)"
    ),
    flags.DEFINE_string("predictors", None, "likewise; an empty string for none"),
    flags.DEFINE_integer("horizon", None, "layers predictors look ahead, default 1"),
    flags.DEFINE_integer("num_experts", None, "of a layer, if the trace says nothing"),
)

if __name__ == "__main__":
    common.run("replay", FLAGS)

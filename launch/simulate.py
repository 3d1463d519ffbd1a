"""Simulates a cluster that serves one model, method by method.

python launch/simulate.py --gin_file configs/examples/prism_bigbench_deepseek.gin \
    --out_dir DIR
"""

from absl import flags

from launch import common

FLAGS = (
    flags.DEFINE_string("model", None, "preset, such as deepseek_v2_lite"),
    flags.DEFINE_string("cluster", None, "preset: prism or mixed"),
    flags.DEFINE_string("workload", None, "bigbench, multidata, or domains by commas"),
    flags.DEFINE_string("then_workload", None, "what comes after it, if anything"),
    flags.DEFINE_string("arrivals", None, "poisson, azure_conv, azure_code, mooncake"),
    flags.DEFINE_string("routing_trace", None, "route trace instead of the generator"),
    flags.DEFINE_float("interval_s", None, "mean seconds between requests of a server"),
    flags.DEFINE_integer("requests_per_server", None, "how many"),
    flags.DEFINE_string("methods", None, "placers by commas, or all"),
    flags.DEFINE_integer("max_batch", None, "requests a server runs at a time"),
    flags.DEFINE_float("period_s", None, "between migrations; 0 for none"),
    flags.DEFINE_float("timeline_s", None, "seconds of a Perfetto timeline to keep"),
    flags.DEFINE_integer("seeds", None, "runs; results are medians"),
    common.define_data_dir(),
)

if __name__ == "__main__":
    common.run("simulate", FLAGS)

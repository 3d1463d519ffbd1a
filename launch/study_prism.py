"""Runs one study of placement on a cluster (Prism) and writes it as a results entry.

python launch/study_prism.py --gin_file configs/experiments/prism_table2_study.gin \
  --out_dir DIR
"""

from absl import flags

from launch import common

FLAGS = (
    flags.DEFINE_string("name", None, "of the study, such as prism_table2"),
    flags.DEFINE_string("model", None, "preset, where a study is of one"),
    flags.DEFINE_string("workload", None, "bigbench or multidata, likewise"),
    flags.DEFINE_integer("requests_per_server", None, "how many"),
    flags.DEFINE_integer("seeds", None, "runs; results are medians"),
)

if __name__ == "__main__":
    common.run("study_prism", FLAGS)

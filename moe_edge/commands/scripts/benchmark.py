"""Times one of our paths and, where installed, peers: study `benchmark_SUITE`.

python launch/benchmark.py --suite decode --out_dir DIR
"""

from absl import flags

from launch import common
from moe_edge.core.checks import ConfigError, check_known
from moe_edge.studies.registry import STUDIES

PREFIX = "benchmark_"
SUITES = [name.removeprefix(PREFIX) for name in STUDIES if name.startswith(PREFIX)]
SUITE = flags.DEFINE_string("suite", None, f"one of {', '.join(SUITES)}")
FLAGS = (
    common.define_data_dir(),
    flags.DEFINE_integer("repeats", None, "measured rounds of every case"),
    flags.DEFINE_string(
        "work_dir",
        None,
        "keeps the random checkpoints for a next run (default: removed)",
    ),
)


def study_name() -> str:
    """The study of the suite."""
    if SUITE.value is None:
        raise ConfigError(f"name a suite with --suite: {', '.join(SUITES)}")
    check_known("suite", SUITE.value, SUITES)
    return f"{PREFIX}{SUITE.value}"


if __name__ == "__main__":
    common.run(study_name, FLAGS)

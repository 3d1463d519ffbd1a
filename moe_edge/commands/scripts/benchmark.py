"""Times our engines and, where installed, other programs: study `benchmark_SUITE`.

moe-edge benchmark --suite decode --out_dir DIR
"""

from absl import flags

from moe_edge.bench.registry import STUDIES
from moe_edge.commands import common
from moe_edge.core.checks import ConfigError
from moe_edge.core.suggest import unknown

PREFIX = "benchmark_"
SUITES = [name.removeprefix(PREFIX) for name in STUDIES if name.startswith(PREFIX)]


def study_name() -> str:
    """The study of the suite."""
    suite = flags.FLAGS["suite"].value
    if suite is None:
        raise ConfigError(f"name a suite with --suite: {', '.join(SUITES)}")
    if suite not in SUITES:
        raise ConfigError(unknown("suite", suite, SUITES))
    return f"{PREFIX}{suite}"


def main() -> None:
    """The command; never returns."""
    flags.DEFINE_string("suite", None, f"one of {', '.join(SUITES)}")
    own = (
        common.define_data_dir(),
        flags.DEFINE_integer("repeats", None, "measured rounds of every case"),
        flags.DEFINE_string(
            "work_dir",
            None,
            "keeps the random checkpoints for a next run (default: removed)",
        ),
    )
    common.run(study_name, __doc__, own)

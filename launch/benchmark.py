"""Times our paths and, where installed, peers on the same checkpoint in the same run.

python launch/benchmark.py --suite decode --out_dir DIR
"""

import json
import tempfile
from pathlib import Path

import gin
from absl import flags

from launch import common
from launch.bench.convert import convert_suite
from launch.bench.decode import decode_suite, prefill_suite
from moe_edge.core.checks import check_known, check_positive
from moe_edge.core.files import atomic_folder, check_out_dir
from moe_edge.metrics.machine import git_state, machine_info

SUITES = {
    "decode": decode_suite,
    "prefill": prefill_suite,
    "convert": convert_suite,
}
SUITE = flags.DEFINE_string("suite", None, f"one of {', '.join(SUITES)}")
REPEATS = flags.DEFINE_integer("repeats", None, "measured rounds of every case")
WORK_DIR = flags.DEFINE_string(
    "work_dir", None, "keeps the random checkpoints for a next run (default: removed)"
)


@gin.register
def benchmark(
    *,
    out_dir: str,
    suite: str = "decode",
    repeats: int = 5,
    work_dir: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
) -> dict:
    """Runs one suite.

    Args:
      out_dir: folder for `benchmark.json`.
      suite: one of SUITES.
      repeats: measured rounds; a figure is the median, a ratio the median of rounds.
      work_dir: where random checkpoints (up to 4 GB) are made and kept; None uses a
        temporary folder.
      overwrite: replace a non-empty `out_dir`.
      dry_run: check and stop.
    """
    check_known("suite", suite, SUITES)
    check_positive("repeats", repeats)
    check_out_dir(out_dir, overwrite)
    if dry_run:
        return {"suite": suite, "dry_run": True}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(work_dir or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows = SUITES[suite](repeats, folder)
    report = {"machine": machine_info(), "git": git_state(), "suite": suite}
    with atomic_folder(out_dir, overwrite) as partial:
        text = json.dumps(common.plain(report | {"rows": rows}), indent=2)
        (partial / "benchmark.json").write_text(text + "\n")
    print_table(rows)
    keys = ("case", "ours", "peer", "unit", "ratio", "limit_fraction")
    return {"suite": suite, "rows": [{key: row[key] for key in keys} for row in rows]}


def print_table(rows: list[dict]) -> None:
    """One line a case, for people."""
    print(
        f"{'case':34}{'ours':>10}{'peer':>10}  {'unit':9}{'ratio':>7}{'of limit':>10}"
    )
    for row in rows:
        peer = "-" if row["peer"] is None else f"{row['peer']:.1f}"
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}x"
        limit = row["limit_fraction"]
        limit = "-" if limit is None else f"{100 * limit:.0f} %"
        line = f"{row['case']:34}{row['ours']:10.1f}{peer:>10}  {row['unit']:9}"
        print(f"{line}{ratio:>7}{limit:>10}")


if __name__ == "__main__":
    common.run("benchmark", (SUITE, REPEATS, WORK_DIR))

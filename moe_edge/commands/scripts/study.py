"""Runs one study and writes its entry, results/NAME unless --out_dir names another.

Takes configs/experiments/NAME.gin unless --gin_file names another. Without a name it
lists the studies.

moe-edge study smoe_fig14 --data_dir DIR --out_dir DIR
moe-edge study smoe_fig14 --data_dir DIR --out_dir DIR --starts 5 --append
moe-edge study prism_table1 --gin_param 'prism_table1.seeds = 2' --dry_run
"""

import sys
from pathlib import Path

from absl import flags

from moe_edge.bench.registry import STUDIES
from moe_edge.commands import common, gin_files
from moe_edge.core.checks import ConfigError
from moe_edge.core.suggest import unknown


def study_root() -> str:
    """The study's name; takes its gin file and its folder where none is given."""
    files = flags.FLAGS["gin_file"]
    name = flags.FLAGS["name"].value
    if name is None and files.value:
        name = Path(files.value[-1]).stem
    if name is None:
        raise ConfigError(f"name a study: {', '.join(sorted(STUDIES))}")
    if name not in STUDIES:
        raise ConfigError(unknown("study", name, STUDIES))
    if not files.value:
        folders = (gin_files.folder() / part for part in ("experiments", "examples"))
        paths = (folder / f"{name}.gin" for folder in folders)
        files.value = [str(path) for path in paths if path.is_file()][:1]
    if not common.OUT_DIR.present:
        flags.FLAGS["out_dir"].parse(f"results/{name}")
        flags.FLAGS["out_dir"].using_default_value = False
    return name


def name_first(argv: list[str]) -> list[str]:
    """The arguments with a name that comes first as a flag."""
    if len(argv) > 1 and not argv[1].startswith("-"):
        return [argv[0], "--name", *argv[1:]]
    return argv


def main() -> None:
    """The command; never returns."""
    flags.DEFINE_string("name", None, "of the study; also the first argument")
    own = (
        common.define_data_dir(),
        flags.DEFINE_bool(
            "allow_dirty", None, "write into results/ from files that no commit holds"
        ),
        flags.DEFINE_integer(
            "starts", None, "measure in so many fresh processes, of a round each"
        ),
        flags.DEFINE_bool("append", None, "add the starts to those of the entry"),
    )
    flags.FLAGS["out_dir"].help = "folder of the entry; default results/NAME"
    sys.argv = name_first(sys.argv)
    common.run(study_root, __doc__, own)

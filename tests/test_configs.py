"""Every experiment of configs/ parses, binds its root and passes the dry checks."""

import re
from pathlib import Path

import gin
import pytest

from moe_edge.configurables import get_root

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
EXPERIMENTS = sorted((ROOT / "configs" / "experiments").rglob("*.gin"))
FILES = [*EXPERIMENTS, *sorted((ROOT / "configs" / "examples").rglob("*.gin"))]


def name_of(path: Path) -> str:
    """Folder and name: two folders may hold the same name."""
    return f"{path.parent.name}/{path.stem}"


def parse(path: Path) -> str:
    """Parses a gin file; returns the name of its one root."""
    roots = set(re.findall(r"^(\w+):$", path.read_text(), re.MULTILINE))
    assert len(roots) == 1, "one root a gin file"
    (root,) = roots
    get_root(root)
    gin.parse_config_file(str(path))
    return root


def command_of(path: Path) -> str:
    """The command in the file's first line."""
    return path.read_text().splitlines()[0].removeprefix("# ")


@pytest.fixture(autouse=True)
def clean_gin():
    gin.clear_config()
    yield
    gin.clear_config()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_config_binds_a_known_root(path):
    assert get_root(parse(path)) is not None


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_config_needs_out_dir_and_nothing_else(path):
    parse(path)
    with pytest.raises(Exception, match="OUT_DIR"):
        gin.finalize()
    gin.parse_config("OUT_DIR = 'somewhere'")
    gin.finalize()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_config_passes_its_dry_run(path, tmp_path):
    if "--data_dir" in command_of(path) and not DATA.is_dir():
        pytest.skip(f"needs the data folder {DATA}")
    root = parse(path)
    gin.parse_config(f"OUT_DIR = {str(tmp_path / 'o')!r}")
    gin.bind_parameter(f"{root}.dry_run", True)
    if "--data_dir" in command_of(path):
        gin.bind_parameter(f"{root}.data_dir", str(DATA))
    assert get_root(root)()["dry_run"] is True
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_config_first_line_is_its_command(path):
    command = command_of(path)
    script = re.match(r"python (launch/\w+\.py) ", command)
    assert script and (ROOT / script.group(1)).is_file()
    named = f"launch/study.py {path.stem} " in command and path in EXPERIMENTS
    assert named or path.relative_to(ROOT).as_posix() in command

"""Every experiment of configs/ parses, binds its root and passes the dry checks."""

import re
from pathlib import Path

import gin
import pytest

import moe_edge.configurables  # noqa: F401  registers the roots

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
FILES = sorted((ROOT / "configs" / "experiments").rglob("*.gin"))


def command_of(path: Path) -> str:
    """The command in the file's first line."""
    return path.read_text().splitlines()[0].removeprefix("# ")


@pytest.fixture(autouse=True)
def clean_gin():
    gin.clear_config()
    yield
    gin.clear_config()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_config_binds_a_known_root(path):
    gin.parse_config_file(str(path))
    roots = set(re.findall(r"^(\w+):$", path.read_text(), re.MULTILINE))
    assert len(roots) == 1, "one root a gin file"
    assert gin.get_configurable(roots.pop()) is not None


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_config_needs_out_dir_and_nothing_else(path):
    gin.parse_config_file(str(path))
    with pytest.raises(Exception, match="OUT_DIR"):
        gin.finalize()
    gin.parse_config("OUT_DIR = 'somewhere'")
    gin.finalize()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_config_passes_its_dry_run(path, tmp_path):
    if "--data_dir" in command_of(path) and not DATA.is_dir():
        pytest.skip(f"needs the data folder {DATA}")
    gin.parse_config_file(str(path))
    gin.parse_config(f"OUT_DIR = {str(tmp_path / 'o')!r}")
    root = re.search(r"^(\w+):$", path.read_text(), re.MULTILINE).group(1)
    gin.bind_parameter(f"{root}.dry_run", True)
    if "--data_dir" in command_of(path):
        gin.bind_parameter(f"{root}.data_dir", str(DATA))
    assert gin.get_configurable(root)()["dry_run"] is True
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_config_first_line_is_its_command(path):
    command = command_of(path)
    script = re.match(r"python (launch/\w+\.py) ", command)
    assert script and (ROOT / script.group(1)).is_file()
    assert path.relative_to(ROOT).as_posix() in command

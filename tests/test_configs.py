"""Every experiment of configs/ parses, binds its root and passes the dry checks."""

import ast
import inspect
import re
import sys
from pathlib import Path

import gin
import pytest

from moe_edge.commands.common import hand_over
from moe_edge.commands.gin_data import Names, check_settings
from moe_edge.configurables import OPTIONS, get_root, others, read_by
from moe_edge.core.checks import ConfigError
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.place import ranks

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
EXPERIMENTS = sorted((ROOT / "configs" / "experiments").rglob("*.gin"))
FILES = [*EXPERIMENTS, *sorted((ROOT / "configs" / "examples").rglob("*.gin"))]


def name_of(path: Path) -> str:
    """Folder and name: two folders may hold the same name."""
    return f"{path.parent.name}/{path.stem}"


def root_of(path: Path) -> str:
    """The name of a gin file's one root."""
    roots = set(re.findall(r"^(\w+):$", path.read_text(), re.MULTILINE))
    assert len(roots) == 1, f"one root a gin file: {path}"
    return roots.pop()


def parse(path: Path) -> str:
    """Parses a gin file; returns the name of its root."""
    root = root_of(path)
    macros = "OUT_DIR", "SEED"
    names = Names(read_by(root), others(root), OPTIONS, get_root, macros)
    check_settings([str(path)], [], names)
    gin.parse_config_file(str(path), skip_unknown=others(root))
    if "offload" in inspect.signature(get_root(root)).parameters:
        hand_over(root, "offload", OffloadOptions)  # as a command does
    return root


def command_of(path: Path) -> str:
    """The command in the file's first line."""
    return path.read_text().splitlines()[0].removeprefix("# ")


@pytest.fixture(autouse=True)
def clean_gin():
    gin.clear_config()
    yield
    gin.clear_config()


def test_configs_bind_a_known_root_and_need_only_out_dir():
    for path in FILES:
        gin.clear_config()
        assert get_root(parse(path)) is not None, path
        with pytest.raises(Exception, match="OUT_DIR"):
            gin.finalize()
        gin.parse_config("OUT_DIR = 'somewhere'")
        gin.finalize()


def test_every_experiment_has_its_entry_and_every_entry_its_experiment():
    entries = {path.parent.name for path in (ROOT / "results").glob("*/result.json")}
    of_other_machines = {name for name in entries if name.endswith("_epyc")}
    live = ("cluster", "coserve")  # these write no entry
    with_entry = {path.stem for path in EXPERIMENTS if root_of(path) not in live}
    assert with_entry == entries - of_other_machines
    assert {name.removesuffix("_epyc") for name in of_other_machines} <= entries


def dry_run_case(path: Path):
    """A config; of those that generate routing for seconds one is no slow test."""
    is_slow = "\nsimulate:\n" in path.read_text() and path.stem != "prism_mixed"
    marks = pytest.mark.slow if is_slow else ()
    return pytest.param(path, id=name_of(path), marks=marks)


DRY_RUNS = [dry_run_case(path) for path in FILES]


@pytest.mark.parametrize("path", DRY_RUNS)
def test_config_passes_its_dry_run(path, tmp_path):
    if "--data_dir" in command_of(path) and not DATA.is_dir():
        pytest.skip(f"needs the data folder {DATA}")
    root = parse(path)
    gin.parse_config(f"OUT_DIR = {str(tmp_path / 'o')!r}")
    gin.bind_parameter(f"{root}.dry_run", True)
    if "--data_dir" in command_of(path):
        gin.bind_parameter(f"{root}.data_dir", str(DATA))
    if ranks.INSTALL in path.read_text() and not has_ranks():
        with pytest.raises(ConfigError, match=re.escape(ranks.INSTALL)):
            get_root(root)()
    else:
        assert get_root(root)()["dry_run"] is True
    assert not (tmp_path / "o").exists()


def has_ranks() -> bool:
    """Whether the package of ranks is here: no extra of ours installs it."""
    return any((Path(folder) / ranks.FOLDER).is_dir() for folder in sys.path)


BINDING = re.compile(r"^  (\w+) = (.+?)(?=^  \w+ = |^\w|\Z)", re.MULTILINE | re.DOTALL)


def test_no_experiment_repeats_a_default():
    """What a file binds differs from its root's default, or says `# default: WHY`."""
    repeated = []
    for path in EXPERIMENTS:
        parameters = inspect.signature(get_root(root_of(path))).parameters
        for name, text in BINDING.findall(path.read_text()):
            if "# default:" in text or text.lstrip().startswith("%"):
                continue
            value = ast.literal_eval(re.sub(r"#.*$", "", text, flags=re.MULTILINE))
            default = parameters[name].default
            if isinstance(value, list | tuple) and isinstance(default, list | tuple):
                value, default = tuple(value), tuple(default)
            if value == default and isinstance(value, bool) == isinstance(
                default, bool
            ):
                repeated.append(f"{path.name}: {name} = {value!r}")
    assert not repeated, f"delete what the default is already: {repeated}"


def test_configs_first_line_is_their_command():
    for path in FILES:
        command = command_of(path)
        script = re.match(r"python (launch/\w+\.py) ", command)
        assert script and (ROOT / script.group(1)).is_file(), path
        named = f"launch/study.py {path.stem} " in command
        assert named or path.relative_to(ROOT).as_posix() in command, path

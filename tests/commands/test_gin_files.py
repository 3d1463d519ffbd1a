"""`--gin_file NAME`: of the working directory, the clone, or the installed package."""

from pathlib import Path

import pytest

from moe_edge.commands import gin_files
from moe_edge.core.checks import ConfigError

ROOT = Path(__file__).parents[2]
OURS = str(ROOT / "configs/policies/smoe.gin")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The package as a wheel leaves it, beside a stranger's folder `configs`."""
    package = tmp_path / "site-packages" / "moe_edge"
    monkeypatch.setattr(gin_files, "PACKAGE", package)
    for place in (package, package.parent):
        file = place / "configs" / "policies" / "smoe.gin"
        file.parent.mkdir(parents=True)
        file.write_text(f"# {place.name}\n")
    return package


@pytest.mark.parametrize(
    "given",
    ["smoe", "policies/smoe", "configs/policies/smoe", "configs/policies/smoe.gin"],
)
def test_find_takes_the_clones_file_from_any_folder(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert gin_files.find(given) == OURS


def test_find_takes_the_installed_file_where_no_clone_is(installed):
    assert gin_files.folder() == installed / "configs"
    assert Path(gin_files.find("smoe")).read_text() == "# moe_edge\n"


def test_find_takes_the_clone_first(installed):
    (installed.parent / "pyproject.toml").write_text("")
    assert Path(gin_files.find("smoe")).read_text() == "# site-packages\n"


def test_find_takes_a_file_of_the_working_directory_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smoe").mkdir()  # a folder is no file
    assert gin_files.find("smoe") == OURS
    (tmp_path / "lru").write_text("")
    assert gin_files.find("lru") == "lru"


@pytest.mark.parametrize(
    "path", ["/nowhere/smoe", "./smoe", "../smoe", "smoe.gin", "configs/none.gin"]
)
def test_find_leaves_a_path_to_whoever_reads_it(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert gin_files.find(path) == path


def test_find_refuses_a_name_of_several_files():
    both = "configs/examples/prism_table1 or configs/experiments/prism_table1"
    wanted = f"--gin_file prism_table1 is the name of several: write {both}"
    with pytest.raises(ConfigError, match=f"^{wanted}$"):
        gin_files.find("prism_table1")
    assert gin_files.find("examples/prism_table1").endswith("examples/prism_table1.gin")


def test_find_names_the_nearest_of_an_unknown_name(run_command, run_script):
    wanted = (
        "error: --gin_file smeo: no such file, and none of this name in "
        f"{ROOT}/configs; "
        "did you mean 'smoe'? expected a path, or the name of a file there without .gin"
    )
    flags = "generate", "--prompt", "a", "--gin_file", "smeo"
    assert run_command(*flags).error == run_script(*flags).error == wanted
    with pytest.raises(ConfigError, match="zzzz: no .*configs; expected a path"):
        gin_files.find("zzzz")


def test_command_reads_the_named_file(run_command, tiny):
    flags = "--checkpoint", tiny, "--prompt", "a", "--dry_run", "--gin_file", "smoe"
    summary = run_command("generate", *flags).summary
    assert summary["out_dir"].startswith("results/local/smoe/")
    eviction = "--gin_param", "offload.eviction = 'none such'"
    assert "'none such'" in run_command("generate", *flags, *eviction).error


@pytest.mark.parametrize(
    "message, place",
    [
        ("unknown eviction policy 'lrru'; did you mean 'lru'?", 2),
        ("unknown route policy 'lru'", None),  # in two lines
        ("unknown mode 'dark'", None),  # in a comment
        ("mode is 3, expected a text", None),
    ],
)
def test_place_of_a_refused_value(tmp_path, message, place):
    file = tmp_path / "a.gin"
    file.write_text(
        "generate.prompt = ['lru']\n"
        "offload.eviction = 'lrru'  # not 'lru'\n"
        "offload.route = \"lru\"  # mode = 'dark'\n"
    )
    wanted = f"{file}:{place}: " if place else ""
    assert gin_files.place_of(message, [str(file)]) == wanted
    assert gin_files.place_of(f"{file}:2: {message}", [str(file)]) == ""


def test_a_refused_value_of_a_gin_file_is_named_with_its_line(run_command, tmp_path):
    (tmp_path / "a.gin").write_text("# one\noffload.eviction = 'lrru'\n")
    flags = "--prompt", "x", "--device_memory", "25%", "--gin_file", "a.gin"
    done = run_command("generate", *flags, "--dry_run")
    assert done.code == 2
    wanted = (
        "error: a.gin:2: unknown eviction policy 'lrru'; did you mean 'lru'? known:"
    )
    assert done.stderr.startswith(wanted)

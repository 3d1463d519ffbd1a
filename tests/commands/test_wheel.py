"""The package as a wheel installs it: without a clone, and without a name of others.

`.ci/wheel` installs one with its dependencies; it runs quickstart, README's lines and a
server.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = "moe_edge", "launch", "configs"
FILES = "setup.py", "pyproject.toml", "README.md", "LICENSE"
PROMPT = ("--prompt", "Once upon a time", "--max_new_tokens", "4")
NEITHER = "__pycache__", "_native*.so"  # of this clone's own

pytestmark = pytest.mark.slow


def environment() -> dict[str, str]:
    """Ours, in which no clone is on Python's path."""
    return {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}


def run(*command, cwd) -> SimpleNamespace:
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return SimpleNamespace(
        summary=lambda: json.loads(done.stdout.splitlines()[-1]),
        out=done.stdout,
        err=done.stderr,
    )


@pytest.fixture
def site(tmp_path_factory):
    """The site-packages of a new environment with the wheel; beside it ours, last."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in FOLDERS:
        ignore = shutil.ignore_patterns(*NEITHER)
        shutil.copytree(ROOT / name, folder / "clone" / name, ignore=ignore)
    for name in FILES:
        shutil.copy(ROOT / name, folder / "clone" / name)
    pip = sys.executable, "-m", "pip", "--disable-pip-version-check"
    offline = "--no-deps", "--no-build-isolation", "--no-index"
    run(*pip, "wheel", "./clone", *offline, "-w", "made", cwd=folder)
    (wheel,) = (folder / "made").glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    run(*pip, "--python", python, "install", "--no-deps", wheel, cwd=folder)
    (site,) = folder.glob("venv/lib/python*/site-packages")
    ours = [entry for entry in sys.path if entry.endswith("-packages")]
    (site / "ours.pth").write_text("\n".join(ours) + "\n")
    return site


def test_wheel_in_an_empty_folder(site, tmp_path):
    """One test: each of xdist's workers would build a wheel of its own."""
    script = site.parents[2] / "bin" / "moe-edge"

    def moe_edge(*arguments) -> SimpleNamespace:
        return run(script, *arguments, cwd=tmp_path)

    check_one_top_level_package(site)
    check_commands_run_dry(moe_edge, tmp_path)
    check_a_policy_by_name(moe_edge, site, tmp_path)
    check_start_without_kernels(moe_edge, site)


def check_one_top_level_package(site):
    installed = {path.name for path in site.iterdir()} - {"ours.pth"}
    assert {name.partition("-")[0] for name in installed} == {"moe_edge"}
    (found,) = importlib.metadata.distributions(path=[str(site)])
    names = {path.as_posix() for path in found.files}
    wanted = ROOT.rglob("configs/**/*.gin")
    assert {f"moe_edge/{path.relative_to(ROOT)}" for path in wanted} <= names
    assert {"moe_edge/commands/scripts/generate.py", "moe_edge/py.typed"} <= names
    assert not [name for name in names if "launch" in name.split("/")]


def check_commands_run_dry(moe_edge, folder):
    for command in (["quickstart"], ["study", "prism_table1"]):
        assert moe_edge(*command, "--dry_run").summary()["dry_run"]
    assert [*folder.iterdir()] == []
    assert "Continues prompts with a model." in moe_edge("--help").out


def check_a_policy_by_name(moe_edge, site, folder):
    flags = "--gin_file", "smoe", "--device_memory", "25%", *PROMPT
    done = moe_edge("generate", *flags)
    assert done.summary()["bytes_moved"] > 0 and "Once upon a time" in done.out
    (written,) = folder.glob("results/local/smoe/*")
    assert "offload.route = 'substitute'" in (written / "config.gin").read_text()
    if shutil.which("c++"):
        assert [*site.glob("moe_edge/kernels/_native*.so")]
        assert "host kernels" not in done.err


def check_start_without_kernels(moe_edge, site):
    for library in site.glob("moe_edge/kernels/_native*.so"):
        library.unlink()
    done = moe_edge("generate", *PROMPT, "--out_dir", "o")
    assert done.err.count("the host kernels were not built") == 1

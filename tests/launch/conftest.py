import contextlib
import functools
import io
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import gin
import pytest
from absl.testing import flagsaver

import moe_edge.commands.common  # noqa: F401  its flags outlive a script that runs here
from tests.support.progress_lines import without_progress
from tests.support.tiny_checkpoint import write_tiny_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A tiny random Hugging Face checkpoint with a tokenizer."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


class Done:
    """A finished script: its exit code and what it printed."""

    def __init__(self, code, stdout, stderr):
        self.code, self.stdout, self.stderr = code, stdout, stderr

    @property
    def summary(self) -> dict:
        assert self.code == 0, self.stderr
        return json.loads(self.stdout.splitlines()[-1])

    @property
    def error(self) -> str:
        """The one line on stderr of a script that refused its input."""
        assert self.code == 2, self.stderr
        assert self.stdout == ""
        lines = without_progress(self.stderr).splitlines()
        assert len(lines) == 1, self.stderr
        return lines[0]


@contextlib.contextmanager
def as_a_new_process(folder: Path, arguments: list[str]):
    """This process as a script finds it: its folder, arguments, no flags, no gin."""
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    cwd, argv = Path.cwd(), sys.argv
    path, environment = list(sys.path), dict(os.environ)
    os.environ.pop("MOE_EDGE_DEBUG", None)
    os.environ["GLIBC_TUNABLES"] = ""  # launch/pretrain.py starts again without
    os.chdir(folder)
    sys.argv = arguments
    try:
        with flagsaver.as_parsed():  # flags defined meanwhile go too
            yield
    finally:
        os.chdir(cwd)
        sys.argv, sys.path[:] = argv, path
        for number, handler in handlers.items():
            signal.signal(number, handler)
        gin.clear_config()
        os.environ.clear()
        os.environ.update(environment)


@pytest.fixture(scope="session")
def run_script_in():
    """Runs `python launch/NAME.py ARGS` in this process and a folder.

    A script's imports and compiled programs are there from the test before; only what
    is about the process itself needs `run_process`.
    """

    def run(folder, name, *arguments):
        script = name if os.path.isabs(name) else f"{ROOT}/launch/{name}.py"
        out, err, code = io.StringIO(), io.StringIO(), 0
        with (
            as_a_new_process(folder, [script, *map(str, arguments)]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as end:
                code = end.code or 0
        return Done(code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture
def run_script(run_script_in, tmp_path):
    """`run_script_in` an empty folder."""
    return functools.partial(run_script_in, tmp_path)


@pytest.fixture
def run_process(tmp_path):
    """Runs a script in a process of its own: `launch/NAME.py`, or `-m launch.NAME`."""

    def run(name, *arguments, as_module=False, **env):
        script = f"{ROOT}/launch/{name}.py" if not os.path.isabs(name) else name
        script = ["-m", f"launch.{name}"] if as_module else [script]
        done = subprocess.run(
            [sys.executable, *script, *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
            timeout=300,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run

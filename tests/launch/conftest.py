import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.script_server import ScriptServer
from tests.support.tiny_checkpoint import write_tiny_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A tiny random Hugging Face checkpoint with a tokenizer."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


class Done:
    """A finished script."""

    def __init__(self, code: int, stdout: str, stderr: str):
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
        lines = self.stderr.splitlines()
        assert len(lines) == 1, self.stderr
        return lines[0]


@pytest.fixture(scope="session")
def script_server():
    server = ScriptServer()
    yield server
    server.close()


@pytest.fixture
def run_script(script_server, tmp_path, tmp_path_factory):
    """Runs `python launch/NAME.py ARGS` (or `-m launch.NAME`) in an empty folder.

    NAME.py is a script in that folder. A script that gets variables of its own is a
    fresh interpreter; others are forks of one that has imported what all import.
    """

    def run(name, *arguments, as_module=False, **env):
        path = tmp_path / name if name.endswith(".py") else f"{ROOT}/launch/{name}.py"
        script = ["-m", f"launch.{name}"] if as_module else [path]
        command = [*map(str, (*script, *arguments))]
        if not env:
            scratch = tmp_path_factory.mktemp("script")
            return Done(*script_server.run(command, tmp_path, scratch, timeout_s=300))
        process = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
            timeout=300,
        )
        return Done(process.returncode, process.stdout, process.stderr)

    return run

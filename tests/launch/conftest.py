import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_checkpoint import write_tiny_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A tiny random Hugging Face checkpoint with a tokenizer."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


class Done:
    """A finished script."""

    def __init__(self, process):
        self.code, self.stdout = process.returncode, process.stdout
        self.stderr = process.stderr

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


@pytest.fixture
def run_script(tmp_path):
    """Runs `python launch/NAME.py ARGS` (or `-m launch.NAME`) in an empty folder."""

    def run(name, *arguments, as_module=False, **env):
        script = ["-m", f"launch.{name}"] if as_module else [f"{ROOT}/launch/{name}.py"]
        process = subprocess.run(
            [sys.executable, *script, *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
            timeout=300,
        )
        return Done(process)

    return run

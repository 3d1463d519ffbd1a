"""Runs scripts as processes of their own that need not import anything heavy first.

One server process imports what all scripts import, which takes seconds, and has one
thread. For each script it forks a child, which sets its arguments, folder and output
and runs the file like `python FILE` does: flags, gin, JAX and exit code are its own.
"""

import gc
import importlib
import json
import os
import runpy
import select
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRELOADED = (
    "matplotlib",
    "scipy.stats",
    "tokenizers",
    "orbax.checkpoint",
    "absl.app",
    "moe_edge.configurables",
)


class ScriptServer:
    """The tests' side; one server, started with the first script."""

    def __init__(self):
        self._process = None

    def run(self, arguments: list[str], cwd: Path, scratch: Path, timeout_s: float):
        """Runs `python ARGUMENTS` in `cwd`; gives (exit code, stdout, stderr).

        Args:
          arguments: a script's path, or "-m" and a module; then its own arguments.
          scratch: an existing folder for the two outputs.
        """
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )
        out, err = scratch / "stdout", scratch / "stderr"
        job = {"argv": arguments, "cwd": str(cwd), "out": str(out), "err": str(err)}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            self.close()
            raise TimeoutError(f"{arguments} took more than {timeout_s} s")
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the script server ended while it ran {arguments}")
        return json.loads(answer)["code"], out.read_text(), err.read_text()

    def close(self):
        """Ends the server."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def serve() -> None:
    """Forks a child for every line of standard input; answers with its exit code."""
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # what is shared need not be looked through when a child ends
    while line := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            run_here(json.loads(line))
            return
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps({"code": code}), flush=True)


def run_here(job: dict) -> None:
    """Makes this process the script's; its exceptions and exits are the caller's."""
    for name, number in (("out", 1), ("err", 2)):
        file = os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(os.devnull)  # noqa: SIM115  open as long as the process
    os.chdir(job["cwd"])
    first, *rest = job["argv"]
    if first == "-m":
        sys.argv, sys.path[0] = rest, job["cwd"]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [first, *rest], str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    serve()

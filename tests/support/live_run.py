"""Runs of `launch/cluster.py` as processes of their own, and who of them is there."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from moe_edge.cluster.node.membership import free_port
from tests.support.progress_lines import without_progress

ROOT = Path(__file__).parents[2]
MARK = "MOE_EDGE_TEST_RUN"
# A shell's background job ignores SIGINT, and so would what its tests start.
WITH_INTERRUPTS = (
    *(sys.executable, "-c"),
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])",
)
WAIT_S = 180.0  # for what a loaded machine may take


class LiveRun:
    """A supervisor that was started; all processes below it carry its mark.

    Attributes:
      process: the supervisor.
    """

    def __init__(self, folder: Path, *flags):
        self._mark = uuid.uuid4().hex
        self._out = folder / f"{self._mark}.out"
        self._err = folder / f"{self._mark}.err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [*WITH_INTERRUPTS, f"{ROOT}/launch/cluster.py", *map(str, flags)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(ROOT), MARK: self._mark},
            )

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    @property
    def errors(self) -> list[str]:
        """Lines on stderr that are no news of the run's progress."""
        news = ("processes joined", "compiled in", " s a request", "no calibration")
        lines = without_progress(self.stderr).splitlines()
        return [line for line in lines if not any(part in line for part in news)]

    @property
    def summary(self) -> dict:
        return json.loads(self._out.read_text().splitlines()[-1])

    def wait(self) -> int:
        """The exit code."""
        return self.process.wait(WAIT_S)

    def wait_for(self, text: str) -> None:
        """Until the scheduler has said something."""
        wait_until(lambda: text in self.stderr or self.process.poll() is not None)
        assert text in self.stderr, self.stderr

    def below(self) -> dict[int, int]:
        """Number of each process of the cluster that runs -> its pid."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                marked = f"{MARK}={self._mark}".encode() in (
                    (folder / "environ").read_bytes()
                )
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if marked and b"moe_edge.cluster.process" in words:
                    found[int(words[-2])] = int(folder.name)
        return found

    def end(self) -> None:
        """Kills what is left of it."""
        for pid in (self.process.pid, *self.below().values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def wait_until(condition, timeout_s: float = WAIT_S) -> float:
    """Seconds until something holds."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() - started_s < timeout_s, "waited in vain"
        time.sleep(0.02)
    return time.monotonic() - started_s


def unused_ports(count: int) -> list[int]:
    """Ports that nobody listens on, and that no connection of others gets by chance."""
    ports = set()
    while len(ports) < count:
        ports.add(free_port("127.0.0.1"))
    return [*ports]

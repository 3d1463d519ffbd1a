"""One command as two processes of a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.live_run import ROOT, unused_ports
from tests.support.progress_lines import without_progress

WAIT_S = 240.0  # two processes compile the same programs on cores that others use


class TwoProcesses:
    """`launch/NAME.py ARGUMENTS` twice; each writes into a folder of its own.

    Attributes:
      processes: by number.
      out_dirs: what each got as its --out_dir, if the command has one.
    """

    def __init__(self, folder: Path, name: str, *arguments, has_out_dir=True):
        self._folder, (port,) = folder, unused_ports(1)
        self.out_dirs = [folder / f"out{index}" for index in (0, 1)]
        self.processes = []
        for index in (0, 1):
            flags = [*arguments, "--coordinator", f"127.0.0.1:{port}"]
            flags += ["--num_processes", 2, "--process_id", index]
            if has_out_dir:
                flags += ["--out_dir", self.out_dirs[index]]
            with self._out(index).open("w") as out, self._err(index).open("w") as err:
                self.processes.append(self._start(name, flags, out, err))

    def _start(self, name: str, flags: list, out, err) -> subprocess.Popen:
        one_device = "--xla_force_host_platform_device_count=1"
        return subprocess.Popen(
            [sys.executable, f"{ROOT}/launch/{name}.py", *map(str, flags)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=self._folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": one_device},
        )

    def _out(self, index: int) -> Path:
        return self._folder / f"{index}.out"

    def _err(self, index: int) -> Path:
        return self._folder / f"{index}.err"

    def lines(self, index: int) -> list[str]:
        """Of its stdout so far."""
        return self._out(index).read_text().splitlines()

    def summaries(self) -> list[dict]:
        """The last line of each, once both have ended well and said nothing else."""
        codes = [process.wait(WAIT_S) for process in self.processes]
        said = [without_progress(self._err(index).read_text()) for index in (0, 1)]
        assert codes == [0, 0], said
        assert said[1] == "" and len(self.lines(1)) == 1
        return [json.loads(self.lines(index)[-1]) for index in (0, 1)]

    def __enter__(self) -> "TwoProcesses":
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

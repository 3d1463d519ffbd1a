"""Starts processes of a cluster on this machine, watches them, and ends them all."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from moe_edge.cluster.options import ClusterOptions
from moe_edge.cluster.roles import FIRST
from moe_edge.cluster.spec import began_file
from moe_edge.core.checks import ConfigError, MoeEdgeError, check_cores
from moe_edge.core.progress import say

POLL_S = 0.05
END_S = 2.0  # for processes to end by themselves
SHOWN = 2000  # characters of a log that an error shows
CACHE = "JAX_COMPILATION_CACHE_DIR"
# Of each process.
ENVIRONMENT = {"PYTHONUNBUFFERED": "1"}
# Processes may share a GPU's memory.
UNLESS_GIVEN = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


class ClusterLost(MoeEdgeError):
    """The scheduler or all servers are gone."""

    exit_code = 3


def _few_threads(processes: int, given: Mapping[str, str]) -> dict[str, str]:
    """A thread of XLA a process, where processes are more than this machine's cores.

    Threads beyond the cores only wait for each other: OD-MoE's seven processes
    on two cores took 1.3 times the processor time for a token (docs/measurements.md).
    XLA cuts a program for its threads when it compiles it, and the key of JAX's cache
    does not say for how many: such programs go into a folder of their own there.

    Args:
      given: the environment; a number of threads that it names stays.
    """
    if processes <= len(os.sched_getaffinity(0)) or "NPROC" in given:
        return {}
    few = {"NPROC": "1"}
    if given.get(CACHE):
        few[CACHE] = os.path.join(given[CACHE], "one_thread")
    return few


class Processes:
    """Processes started here; leaving the context ends them all.

    Args:
      module: what each runs.
      own: number -> what its environment has besides that of all, such as its GPU.
      shown: whose logs appear on stderr as they grow.
      speaks: a process whose stdout is this one's, not in its log.
    """

    def __init__(
        self,
        spec: Path,
        options: ClusterOptions,
        logs: Path,
        prefixes: Mapping[int, Sequence[str]],
        *,
        module: str = "moe_edge.cluster.process",
        own: Mapping[int, Mapping[str, str]] | None = None,
        shown: Collection[int] = (0,),
        speaks: int | None = None,
    ):
        self._module, self._speaks, self._own = module, speaks, own or {}
        self._spec, self._options, self._logs = spec, options, logs
        self._prefixes = prefixes  # words before the command of each
        self._running: dict[int, subprocess.Popen] = {}
        self._shown = dict.fromkeys(shown, 0)  # bytes of their logs

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_) -> None:
        for process in self._running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)  # also a stopped one
        for process in self._running.values():
            process.wait()

    def start(self, numbers: list[int]) -> None:
        """Starts them; each writes a log of its own."""
        cores = check_cores(self._options.cores, len(numbers))
        environment = UNLESS_GIVEN | os.environ | ENVIRONMENT
        if cores is None and self._options.few_threads:
            environment |= _few_threads(len(numbers), environment)
        for number in numbers:
            command = [*self._prefixes.get(number, ()), sys.executable]
            command += ["-m", self._module]
            with self._log(number).open("wb") as log:
                process = subprocess.Popen(
                    [*command, str(self._spec), str(number)],
                    stdin=subprocess.DEVNULL,
                    stdout=None if number == self._speaks else log,
                    stderr=log,
                    env=environment | self._own.get(number, {}),
                    start_new_session=True,  # Ctrl-C is the supervisor's
                )
            self._running[number] = process
            if cores is not None:
                os.sched_setaffinity(process.pid, cores[numbers.index(number)])

    def send(self, number: int, what: signal.Signals) -> None:
        """Sends a process a signal, if it runs."""
        self._running[number].send_signal(what)

    def _log(self, number: int) -> Path:
        return self._logs / f"{self._options.name_of(number)}.log"

    def watch(self) -> None:
        """Until the run is over.

        A server's end is the scheduler's business, once it has begun; before, and
        where the scheduler is elsewhere, it is the end of all.

        Raises:
          ConfigError: a process refuses what it was given.
          ClusterLost: the scheduler is gone, or a server did not begin.
        """
        deciding = 0 if 0 in self._running else min(self._running)
        while True:
            self._show()
            ended = {n: p.poll() for n, p in self._running.items()}
            failed = {
                n: code
                for n, code in ended.items()
                if code and (n == deciding or not began_file(self._spec, n).exists())
            }
            if failed:
                self._show()
                raise self._error_of(failed)
            if ended[deciding] == 0:
                self._wait_for_others()
                return
            time.sleep(POLL_S)

    def _error_of(self, failed: Mapping[int, int]) -> MoeEdgeError:
        """What went wrong: refusals first, those who only lost others last."""
        order = {ConfigError.exit_code: 0, 1: 1, ClusterLost.exit_code: 3}
        number = min(failed, key=lambda n: (order.get(failed[n], 2), n))
        name, code = self._options.name_of(number), failed[number]
        words = self._last_words(number)
        if code == ConfigError.exit_code and words is not None:
            return ConfigError(words)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        if words is None and number != 0:  # the scheduler's has been shown
            print(self._log_of(number)[-SHOWN:].strip(), file=sys.stderr)
        said = "" if words is None else f": {words}"
        return ClusterLost(f"{name} {how}{said}; all its processes are ended")

    def _last_words(self, number: int) -> str | None:
        """The error in a process's log, if it says one."""
        lines = self._log_of(number).splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        return errors[-1].removeprefix("error: ") if errors else None

    def _log_of(self, number: int) -> str:
        return self._log(number).read_text(encoding="utf-8", errors="replace")

    def _wait_for_others(self) -> None:
        drill = self._options.drill_plan
        if drill is not None and drill.kind == "stop":
            struck = self._running.get(FIRST + drill.server)
            if struck is not None:  # it cannot end by itself
                struck.kill()
        until_s = time.monotonic() + END_S
        while time.monotonic() < until_s:
            if all(p.poll() is not None for p in self._running.values()):
                return
            time.sleep(POLL_S)

    def _show(self) -> None:
        """What the scheduler has printed meanwhile, and others that are shown."""
        for number in self._shown.keys() & self._running.keys():
            with self._log(number).open("rb") as log:
                log.seek(self._shown[number])
                new = log.read()
            end = new.rfind(b"\n") + 1
            self._shown[number] += end
            for line in new[:end].decode("utf-8", "replace").splitlines():
                if not line.startswith("error: "):
                    say(line)

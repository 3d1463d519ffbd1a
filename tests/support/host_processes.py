"""Pairs of processes that compute together or rest, and what strikes one of each.

    python -m tests.support.host_processes FOLDER SCENARIO PORT [SCENARIO PORT ...]

A scenario is `ACTION WHO WHERE`: kill, stop or pause (for two seconds) process 0 or 1
in a step or while all rest; `differ 1 start`: it was started otherwise. All pairs are
forks of one process that has imported JAX, and run at once. Prints what became of each
process: its exit code (None: it had to be ended), how long after the strike, and what
it wrote.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import PartitionSpec

from moe_edge.core.checks import MoeEdgeError
from moe_edge.hosts.place import Place
from moe_edge.hosts.run import finish, joined

PAUSE_S = 2.0
START_S, END_S = 120.0, 40.0


def compute(folder: Path, name: str, index: int, port: int) -> None:
    """A process: it joins, then runs steps, or rests, until process 0 says so."""
    differs = name.startswith("differ") and index == 1
    facts = {"version of moe_edge": "other" if differs else "one"}
    with joined(Place("127.0.0.1", port, index, 2), START_S, facts) as link:
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
        whole, parted = PartitionSpec(), PartitionSpec("d")

        def total(x):
            return jax.lax.psum(x, "d")

        step = jax.jit(
            jax.shard_map(total, mesh=mesh, in_specs=parted, out_specs=whole)
        )
        where = jax.sharding.NamedSharding(mesh, parted)

        def told_to_end(is_told: bool) -> bool:
            own = np.full(1, is_told and index == 0, np.float32)
            x = jax.make_array_from_process_local_data(where, own)
            return bool(np.asarray(step(x))[0])

        told_to_end(False)
        (folder / f"{name}.{index}.ready").touch()
        while name.endswith("rest"):
            time.sleep(0.1)
        while not told_to_end((folder / f"{name}.end").exists()):
            pass
        finish(link, {})


def be_child(folder: Path, name: str, index: int, port: int) -> None:
    """Never returns."""
    out = os.open(folder / f"{name}.{index}.err", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    code = 0
    try:
        compute(folder, name, index, port)
    except MoeEdgeError as error:  # as commands do
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    finally:
        os._exit(code)


class Pair:
    """Two processes, of which one is struck."""

    def __init__(self, folder: Path, name: str, port: str):
        self.folder, self.name, self.ended = folder, name, {}
        self.pids = {}
        for index in (0, 1):
            self.pids[index] = os.fork()
            if not self.pids[index]:
                be_child(folder, name, index, int(port))
        action, who, _ = name.split()
        self.action, self.victim = action, self.pids[int(who)]

    def is_ready(self) -> bool:
        if self.action == "differ":
            return True
        files = (self.folder / f"{self.name}.{index}.ready" for index in (0, 1))
        return all(file.exists() for file in files)

    def strike(self) -> None:
        self.struck_s = time.monotonic()
        if self.action != "differ":
            is_kill = self.action == "kill"
            os.kill(self.victim, signal.SIGKILL if is_kill else signal.SIGSTOP)

    def look(self) -> bool:
        """Whether all who can have ended."""
        now_s = time.monotonic()
        if self.action == "pause" and now_s > self.struck_s + PAUSE_S:
            self.action = "paused"
            os.kill(self.victim, signal.SIGCONT)
            (self.folder / f"{self.name}.end").touch()
        for index, pid in self.pids.items():
            if index not in self.ended:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    code = os.waitstatus_to_exitcode(status)
                    self.ended[index] = code, now_s - self.struck_s
        stopped = int(self.action == "stop")
        return len(self.ended) + stopped == 2

    def end(self) -> list[tuple]:
        """(exit code, seconds, what it wrote) of each process."""
        results = []
        for index, pid in self.pids.items():
            if index not in self.ended:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            text = (self.folder / f"{self.name}.{index}.err").read_text()
            results.append((*self.ended.get(index, (None, None)), text))
        return results


def wait(pairs: list[Pair], is_done, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while not all([is_done(pair) for pair in pairs]) and time.monotonic() < until_s:
        time.sleep(0.02)


def main() -> None:
    folder, *given = sys.argv[1:]
    named = zip(given[::2], given[1::2], strict=True)
    pairs = [Pair(Path(folder), *each) for each in named]
    wait(pairs, Pair.is_ready, START_S)
    time.sleep(0.5)  # they are in a step, or rest
    for pair in pairs:
        pair.strike()
    wait(pairs, Pair.look, END_S)
    print(json.dumps({pair.name: pair.end() for pair in pairs}))


if __name__ == "__main__":
    main()

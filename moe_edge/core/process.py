"""A process of its own for what is measured, and what a process has and took."""

import concurrent.futures
import multiprocessing
import os
import platform
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from moe_edge.core.checks import CapacityError


def alone(function: Callable[..., Any], *args) -> Any:
    """What a call returns in a fresh process: its time and memory are its own.

    Raises:
      CapacityError: the process was ended from outside.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(function, *args).result()
        except concurrent.futures.process.BrokenProcessPool as error:
            raise CapacityError(
                f"the process of {function.__name__} was killed, probably because the "
                "machine ran out of memory; use one with more (files on a tmpfs take "
                "memory, too)"
            ) from error


def cpu_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def peak_rss_bytes() -> int:
    """Most memory this process ever occupied.

    `ru_maxrss` may start with the parent's peak, from before `exec`.
    """
    try:
        text = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:  # no Linux
        text = ""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", text, re.MULTILINE)
    if found:
        return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class CpuUse(NamedTuple):
    """Processor seconds of a machine up to a moment, over all its cores.

    Attributes:
      own_s: of this process and of its children that have ended.
      busy_s: of everything that ran, on a virtual machine what its host took too.
      all_s: there were.
    """

    own_s: float
    busy_s: float
    all_s: float

    @classmethod
    def now(cls) -> "CpuUse | None":
        """None where the system does not tell."""
        try:
            line = Path("/proc/stat").read_text(encoding="utf-8").partition("\n")[0]
        except OSError:  # no Linux
            return None
        # user nice system idle iowait irq softirq steal; guests count as user.
        ticks = [int(part) for part in line.split()[1:9]]
        rate = os.sysconf("SC_CLK_TCK")
        busy = sum(ticks) - sum(ticks[3:5])
        return cls(sum(os.times()[:4]), busy / rate, sum(ticks) / rate)

    def others(self, later: "CpuUse") -> float:
        """Share of the processors that others took until `later`."""
        spent = later.busy_s - self.busy_s - (later.own_s - self.own_s)
        return max(0.0, spent) / max(later.all_s - self.all_s, 1e-9)


def processor() -> str:
    """Name of this machine's processor; unlike ones may round differently."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        named = (line.split(":", 1)[1] for line in lines if line.startswith("model"))
        return " ".join(part.strip() for part in dict.fromkeys(named))
    except OSError:
        return platform.processor()

"""Which GPU each process of a cluster gets: its environment says, before JAX starts.

A process runs on one GPU. Without a word processes take one each, in order, and begin
again where there are fewer GPUs. The scheduler computes nothing; it has the first one.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from moe_edge.cluster.options import ClusterOptions
from moe_edge.cluster.roles import FIRST, SCHEDULER
from moe_edge.core.checks import ConfigError
from moe_edge.place.plan import ABSENT, Placement

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
_DEVICES = Path("/dev")


def gpus_here(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that processes may use, as `CUDA_VISIBLE_DEVICES` names them."""
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    given = environment.get(VISIBLE)
    if given is not None:  # what follows -1 is hidden
        names = (name.strip() for name in given.split(","))
        return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))
    count = len(list(_DEVICES.glob("nvidia[0-9]*")))
    return [str(gpu) for gpu in range(count)]


def gpu_environments(
    options: ClusterOptions,
    numbers: Sequence[int],
    environment: Mapping[str, str],
    named: Sequence[int] | None = None,
) -> dict[int, dict[str, str]]:
    """What each process started here has in its environment because of its GPU.

    Args:
      numbers: of the processes that are started here.
      environment: of all of them.
      named: GPUs of servers that a placement names; `options.gpus` wins.
    Raises:
      ConfigError: `--gpus` of another form or number, or a GPU that is not there.
    """
    here = gpus_here(environment)
    computing = [number for number in numbers if number != SCHEDULER]
    chosen, flag = named, "--placement"
    if options.gpus is not None:
        chosen, flag = _parse(options.gpus, len(computing)), "--gpus"
    elif named is not None:
        chosen = [named[number - FIRST] for number in computing]
    if chosen is None:
        if len(here) < 2:
            return {}  # nothing to choose
        chosen = [(number - FIRST) % len(here) for number in computing]
    elif not here and options.gpus is None:
        return {}  # placed for GPUs, run without
    absent = sorted(gpu for gpu in set(chosen) if gpu >= len(here))
    if absent:
        there = f"has {len(here)}, counted from 0" if here else "has none"
        raise ConfigError(
            f"{flag} names GPU {absent[0]}, but this machine {there} (of those that "
            f"{VISIBLE} and JAX_PLATFORMS let JAX use)"
        )
    order = {} if VISIBLE in environment else {ORDER: "PCI_BUS_ID"}  # as nvidia-smi's
    found = {
        number: {VISIBLE: here[gpu]} | order
        for number, gpu in zip(computing, chosen, strict=True)
    }
    if SCHEDULER in numbers and found:
        found[SCHEDULER] = found[computing[0]]
    return found


def _parse(text: str, processes: int) -> list[int]:
    words = [word.strip() for word in str(text).split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 5 for word in words):
        raise ConfigError(
            f"--gpus is {str(text)!r}, expected numbers of GPUs separated by commas, "
            "such as 0,1"
        )
    if len(words) != processes:
        raise ConfigError(
            f"--gpus names {len(words)} GPUs, expected one for each of the {processes} "
            "processes that are started here (the scheduler needs none)"
        )
    return [int(word) for word in words]


def one_gpu_each(
    placement: Placement, servers: int
) -> tuple[Placement, list[int] | None]:
    """A placement over servers that have one GPU each, and which ones if it says.

    A server of several GPUs becomes a server for each of them, in order, if so many
    are started; these take one GPU each, in order. Where every server uses one GPU
    and not all of them the first, these are its GPUs.
    """
    rows, gpus = [], []
    for gpu_LE in placement.gpu_NLE:
        used = np.unique(gpu_LE[gpu_LE >= 0]).tolist() or [0]
        rows += [np.where(gpu_LE == gpu, 0, ABSENT) for gpu in used]
        gpus += used
    if len(rows) == len(placement.gpu_NLE):
        return Placement(np.stack(rows)), gpus if any(gpus) else None
    if len(rows) == servers:
        return Placement(np.stack(rows)), None
    raise ConfigError(
        f"the placement is over {len(placement.gpu_NLE)} servers with {len(rows)} GPUs "
        f"in all; a process has one GPU: give --servers {len(rows)}, and --slots of "
        "each GPU"
    )

"""Which GPU each process of a cluster gets: its environment says, before JAX starts.

A process runs on one GPU, or on several where `--gpus` joins them (`0+1,2`): they are
homes of its blocks (`node/home_programs.py`). Without a word processes take one each,
in order, and begin again where there are fewer GPUs. The scheduler computes nothing; it
has the first one.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from moe_edge.cluster.options import ClusterOptions
from moe_edge.cluster.roles import FIRST, SCHEDULER
from moe_edge.core.checks import ConfigError
from moe_edge.place.placer import ALONE
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
        if has_several(options):
            _check_several(options)
    elif named is not None:
        chosen = [[named[number - FIRST]] for number in computing]
    if chosen is None:
        if len(here) < 2:
            return {}  # nothing to choose
        chosen = [[(number - FIRST) % len(here)] for number in computing]
    elif not here and options.gpus is None:
        return {}  # placed for GPUs, run without
    absent = sorted({gpu for gpus in chosen for gpu in gpus if gpu >= len(here)})
    if absent:
        there = f"has {len(here)}, counted from 0" if here else "has none"
        raise ConfigError(
            f"{flag} names GPU {absent[0]}, but this machine {there} (of those that "
            f"{VISIBLE} and JAX_PLATFORMS let JAX use)"
        )
    order = {} if VISIBLE in environment else {ORDER: "PCI_BUS_ID"}  # as nvidia-smi's
    found = {
        number: {VISIBLE: ",".join(here[gpu] for gpu in gpus)} | order
        for number, gpus in zip(computing, chosen, strict=True)
    }
    if SCHEDULER in numbers and found:
        found[SCHEDULER] = {VISIBLE: here[chosen[0][0]]} | order
    return found


def has_several(options: ClusterOptions) -> bool:
    """Whether a process has several GPUs."""
    return options.gpus is not None and "+" in str(options.gpus)


def _check_several(options: ClusterOptions) -> None:
    wrong = {f"--mode {options.mode}": not options.several_gpus}
    wrong |= {f"--methods {name}": name in options.method_names for name in ALONE}
    for what in (what for what, is_given in wrong.items() if is_given):
        raise ConfigError(
            f"--gpus {options.gpus} gives a server several GPUs, which {what} does not "
            "use; give one to each process"
        )


def _parse(text: str, processes: int) -> list[list[int]]:
    words = [
        [word.strip() for word in group.split("+")] for group in str(text).split(",")
    ]
    every = [word for group in words for word in group]
    if not all(word.isascii() and word.isdigit() and len(word) < 5 for word in every):
        raise ConfigError(
            f"--gpus is {str(text)!r}, expected numbers of GPUs separated by commas, "
            "such as 0,1, or joined for one process, such as 0+1,2"
        )
    for group in words:
        if len(set(map(int, group))) < len(group):
            raise ConfigError(
                f"--gpus gives one process {'+'.join(group)}, expected each GPU once"
            )
    if len(words) != processes:
        raise ConfigError(
            f"--gpus names {len(words)} GPUs, expected one for each of the {processes} "
            "processes that are started here (the scheduler needs none)"
        )
    return [[int(word) for word in group] for group in words]


def one_gpu_each(
    placement: Placement, servers: int, joined: bool = False
) -> tuple[Placement, list[int] | None]:
    """A placement over servers that have one GPU each, and which ones if it says.

    With `joined` the GPUs of a server belong to its process, which spreads blocks over
    them itself.

    A server of several GPUs becomes a server for each of them, in order, if so many
    are started; these take one GPU each, in order. Where every server uses one GPU
    and not all of them the first, these are its GPUs.
    """
    if joined:
        return Placement(np.where(placement.on_NLE, 0, ABSENT)), None
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

"""Which process of a run this is: by flags, or by what a scheduler has set."""

import os
from collections.abc import Mapping
from typing import NamedTuple

from moe_edge.core.checks import ConfigError
from moe_edge.hosts.options import HostOptions, split_address

# Scheduler -> variables of how many processes and which one; all must be there.
# SLURM's count is also set in a job's own script, which is no process of several.
_SCHEDULERS = {
    "SLURM": ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST"),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
}
_KUBERNETES = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")


class Place(NamedTuple):
    """A process among several.

    Attributes:
      host, port: at which process 0 listens.
      index: of this process; count: of all.
      devices: numbers of this machine's devices that it uses; None: all of them. Where
        a scheduler starts a process for each device, the one of its number.
    """

    host: str
    port: int
    index: int
    count: int
    devices: list[int] | None = None


def find_place(options: HostOptions, environ: Mapping[str, str]) -> Place | None:
    """The place that flags give, or a scheduler; None: this process runs alone.

    Args:
      environ: the process's environment.
    Raises:
      ConfigError: a scheduler's variables that JAX cannot read.
    """
    if options.coordinator is not None:
        host, port = split_address(options.coordinator)
        if options.num_processes == 1:
            return None
        return Place(host, port, options.process_id, options.num_processes)
    scheduler = scheduler_of(environ)
    if options.num_processes == 1 or scheduler is None:
        return None
    return _detected(scheduler, options)


def scheduler_of(environ: Mapping[str, str]) -> str | None:
    """The scheduler that started this process as one of several; None: none did."""
    for name, variables in _SCHEDULERS.items():
        if all(variable in environ for variable in variables):
            count = environ[variables[0]]
            if count.isdecimal() and int(count) > 1:
                return name
    return "Kubernetes" if all(name in environ for name in _KUBERNETES) else None


def _detected(scheduler: str, options: HostOptions) -> Place | None:
    """What JAX reads from a scheduler's variables."""
    from jax._src.clusters import ClusterEnv  # loads JAX

    given: list = [os.environ.get("JAX_COORDINATOR_ADDRESS"), *[None] * 4]
    try:
        found = ClusterEnv.auto_detect_unset_distributed_params(
            *given, int(options.join_timeout_s)
        )
    except Exception as error:  # of the scheduler's own kinds
        raise ConfigError(_refusal(scheduler, str(error))) from error
    coordinator, count, index, devices = found
    if None in (coordinator, count, index):
        raise ConfigError(_refusal(scheduler, "JAX does not recognise it"))
    if count == 1:
        return None
    host, port = split_address(coordinator)
    return Place(host, port, index, count, devices)


def _refusal(scheduler: str, reason: str) -> str:
    return (
        f"{scheduler} started this process as one of several, and who they are cannot "
        f"be read from it ({' '.join(reason.split())[:200]}); give --coordinator, "
        "--num_processes and --process_id, or --num_processes 1 to run alone"
    )

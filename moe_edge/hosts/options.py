"""Options of a run that is several processes, on one machine or several."""

import dataclasses

from moe_edge.core.checks import ConfigError, check_count, check_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Which processes run together.

    Attributes:
      coordinator: HOST:PORT at which process 0 listens; all processes of the run get
        the same. None: as SLURM, Open MPI or Kubernetes say, else this process runs
        alone.
      num_processes: how many processes run together; 1: this one alone, whatever a
        scheduler says.
      process_id: number of this process, from 0.
      join_timeout_s: how long processes wait for each other at the start.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    join_timeout_s: float = 60.0

    def __post_init__(self):
        """Raises ConfigError for flags that do not belong together."""
        check_positive("join_timeout_s", self.join_timeout_s)
        if self.num_processes is not None:
            check_count("num_processes", self.num_processes)
        given = {
            f"--{name}": getattr(self, name)
            for name in ("coordinator", "num_processes", "process_id")
        }
        missing = [flag for flag, value in given.items() if value is None]
        if len(missing) == len(given) or (
            self.num_processes == 1 and self.coordinator is None
        ):
            if self.process_id:
                raise ConfigError(
                    f"--process_id is {self.process_id} and --num_processes 1; "
                    "expected 0"
                )
            return
        if missing:
            has = [flag for flag in given if flag not in missing]
            raise ConfigError(
                f"{' and '.join(has)} without {' and '.join(missing)}; several "
                f"processes need all three: {', '.join(given)}"
            )
        if not 0 <= self.process_id < self.num_processes:
            raise ConfigError(
                f"--process_id is {self.process_id}, expected 0 to "
                f"{self.num_processes - 1} with --num_processes {self.num_processes}"
            )
        split_address(self.coordinator)


def split_address(coordinator: str) -> tuple[str, int]:
    """Host and port of HOST:PORT or [IPv6]:PORT.

    Raises:
      ConfigError: it is neither.
    """
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(
            f"--coordinator is {coordinator!r}, expected HOST:PORT with a port from 1 "
            "to 65535"
        )
    return host.strip("[]"), int(port)

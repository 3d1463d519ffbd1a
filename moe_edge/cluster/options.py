"""What a user says of a cluster of any mode, checked without JAX."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from moe_edge.cluster.drills import Drill, parse_drill
from moe_edge.cluster.roles import SCHEDULER
from moe_edge.cluster.transport.base import HUNG_S
from moe_edge.core.checks import (
    ConfigError,
    check_count,
    check_known,
    check_positive,
)
from moe_edge.core.files import check_there
from moe_edge.model.attention_config import CACHE_TYPES
from moe_edge.route.base import Route, get_route
from moe_edge.training.generators import FAMILIES

MAX_SERVERS = 64


def check_name(option: str, value: object, what: str) -> None:
    """Raises ConfigError for a plug-in that is given as an object."""
    if not isinstance(value, str):
        raise ConfigError(
            f"{option} is {value!r:.60}, and the processes of a cluster know names "
            f"alone; install the {what} as a package (docs/plug_ins.md) and give its "
            "name"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterOptions(abc.ABC):
    """A cluster and what it serves; a mode's class has options of its own.

    Attributes:
      checkpoint: folder (Hugging Face's or ours), GGUF file, or `default`, the model in
        the package; the same on all machines.
      mode: prism (servers that hold blocks and ask each other), or one of a paper's
        (`cluster/modes.py`).
      servers: number of servers; the scheduler is one process more.
      k: experts that a token computes (sub-experts in a refactored model); None: as
        many as the model was made for.
      kv_cache: how every process keeps keys and values: float32, exact; or bfloat16 or
        q8_0, in a half or about a quarter of the bytes, and lossy.
      route: chooses what a decode step computes, by name: with a lossy one (substitute,
        prefer, drop) an expert of another server may give way to one that is here.
        Results then state the share of choices that changed.
      route_options: of the route.
      workload: synthetic requests: the task family of each server, separated by commas
        (arithmetic, words, stories, tables).
      requests_per_server: with `workload`: number of requests of each server.
      interval_s: with `workload`: mean seconds between two requests of a server.
      output_tokens: with `workload`: most new tokens of a request.
      prompts: JSON-lines file `{"id", "prompt", "server"}`, instead of `workload`;
        lines without "server" go to the servers in turn. All requests arrive at once.
      max_new_tokens: with `prompts`: most new tokens of a request.
      link_mbps: limit of every server's network link, set by `tc` (needs root); None:
        no limit.
      hung_s: silence of a process (no heartbeats) after which it is lost. Longer on
        Wi-Fi, whose outages take seconds; a process that hangs holds others up so long.
      secret_file: file with the secret that all machines share; None: one is made for
        this run.
      coordinator: HOST:PORT of the scheduler, where processes are started one by one.
      process_id: number of this process: 0 is the scheduler, i is server i - 1.
      join_timeout_s: how long processes wait for each other at the start.
      drill: fault injection, as KIND:WHO@TOKENS: kill or stop server 1 (kill:1@40) or
        the scheduler (kill:scheduler@40) after so many generated tokens of the last
        method (of od_moe: of all); pause:1@40 stops it for 3 s; accuse:1@40 lets it
        report all others as hung.
      cores: CPU cores of each process, separated by commas (`0,1,0-1`); None: all.
      gpus: GPU of each process but the scheduler, separated by commas (`0,1`); several
        of one server, which share its blocks, are joined (`0+1,2`). None: one each, in
        order, or those that a placement names.
      seed: of requests and placements.
    """

    # What a process goes by that is not the scheduler, and options that are files.
    SHARED: ClassVar[tuple[str, ...]] = (
        *("mode", "servers", "hung_s", "seed", "k", "kv_cache"),
        *("route", "route_options"),
    )
    FILES: ClassVar[tuple[str, ...]] = ("checkpoint", "prompts")
    # Of the mode: whether one process gets all requests, all at once; whether a process
    # may have several GPUs; whether one thread of XLA a process is enough where cores
    # are fewer.
    one_home: ClassVar[bool] = True
    several_gpus: ClassVar[bool] = False
    few_threads: ClassVar[bool] = True

    checkpoint: str = "default"
    mode: str
    servers: int = 3
    k: int | None = None
    kv_cache: str = "float32"
    route: str = "topk"
    route_options: Mapping[str, Any] | None = None
    workload: str | None = None
    requests_per_server: int = 4
    interval_s: float = 1.0
    output_tokens: int = 32
    prompts: str | None = None
    max_new_tokens: int = 64
    link_mbps: float | None = None
    hung_s: float = HUNG_S
    secret_file: str | None = None
    coordinator: str | None = None
    process_id: int | None = None
    join_timeout_s: float = 30.0
    drill: str | None = None
    cores: str | None = None
    gpus: str | None = None
    seed: int = 0

    def __post_init__(self):
        """Raises ConfigError for what no cluster can be."""
        counts = "servers", "requests_per_server", "output_tokens", "max_new_tokens"
        for name in counts:
            check_count(name, getattr(self, name))
        if self.servers > MAX_SERVERS:
            raise ConfigError(f"servers is {self.servers}, expected 1 to {MAX_SERVERS}")
        for name in ("interval_s", "join_timeout_s"):
            check_positive(name, getattr(self, name))
        if not 0.5 <= self.hung_s <= 3600:
            raise ConfigError(
                f"--hung_s is {self.hung_s}, expected 0.5 to 3600 seconds; give 2 or "
                "more on a wired network, 10 or more on Wi-Fi"
            )
        check_known("kv_cache", self.kv_cache, CACHE_TYPES)
        if self.link_mbps is not None:
            check_positive("link_mbps", self.link_mbps)
        self._check_asked()
        check_name("route", self.route, "route")
        self.chosen_route  # noqa: B018  refuses what cannot be
        if self.workload is not None:
            for family in self.families:
                check_known("workload", family, FAMILIES)
        self.drill_plan  # noqa: B018  refuses what cannot be
        self._check_joining()

    def _check_asked(self) -> None:
        if self.is_scheduler:  # others need no requests
            if (self.workload is None) == (self.prompts is None):
                got = "neither" if self.workload is None else "both"
                raise ConfigError(f"give either --workload or --prompts, got {got}")
            if self.prompts is not None:
                check_there(self.prompts, "--prompts")

    def _check_joining(self) -> None:
        if self.link_mbps is not None and self.coordinator is not None:
            raise ConfigError(
                "--link_mbps slows links that the launcher makes itself; give no "
                "--coordinator with it"
            )
        if self.process_id is not None and self.coordinator is None:
            raise ConfigError("--process_id needs --coordinator HOST:PORT; give both")
        if self.coordinator is None:
            return
        host, port = self.coordinator_address
        if self.process_id is not None and not 0 <= self.process_id < self.processes:
            raise ConfigError(
                f"--process_id is {self.process_id}, expected 0 (scheduler) to "
                f"{self.processes - 1}"
            )
        if host not in ("127.0.0.1", "localhost") and self.secret_file is None:
            raise ConfigError(
                f"--coordinator {host}:{port} is reached over a network; give all "
                "processes the same --secret_file"
            )

    @property
    @abc.abstractmethod
    def processes(self) -> int:
        """How many there are, the scheduler among them."""

    @abc.abstractmethod
    def role_of(self, process: int) -> str:
        """The name of a process that is not the scheduler."""

    def name_of(self, process: int) -> str:
        """Of a process: in logs, namespaces, drills and device_bytes."""
        return "scheduler" if process == SCHEDULER else self.role_of(process)

    @property
    def names_in_drills(self) -> dict[str, int]:
        """What a drill calls the processes but the scheduler -> their number there."""
        return {self.name_of(n + 1): n for n in range(self.processes - 1)}

    def result_of(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """What a run returns of its `cluster.json`."""
        return facts["row"]

    @property
    def method_names(self) -> list[str]:
        """What is run, in order."""
        return [self.mode]

    @property
    def is_scheduler(self) -> bool:
        """Whether the scheduler is started here."""
        return self.process_id in (None, 0)

    @property
    def shared(self) -> dict:
        """What must be the same in all processes."""
        return {name: getattr(self, name) for name in self.SHARED}

    @property
    def files(self) -> dict[str, str]:
        """Those of `FILES` that are given."""
        given = {name: getattr(self, name) for name in self.FILES}
        return {name: path for name, path in given.items() if path is not None}

    @property
    def coordinator_address(self) -> tuple[str, int]:
        """Host and port of `coordinator`."""
        host, _, port = self.coordinator.rpartition(":")
        whole = port.isascii() and port.isdigit()
        if not host or not whole or not 0 < int(port) < 65536:
            raise ConfigError(
                f"--coordinator is {self.coordinator!r}, expected HOST:PORT with a "
                "port from 1 to 65535"
            )
        return host, int(port)

    @property
    def families(self) -> list[str]:
        """Task family of each server."""
        return self.workload.split(",")

    @property
    def chosen_route(self) -> Route:
        """What decode steps compute."""
        return get_route(self.route, **(self.route_options or {}))

    @property
    def drill_plan(self) -> Drill | None:
        """The drill, or None."""
        if self.drill is None:
            return None
        return parse_drill(self.drill, self.names_in_drills | {"scheduler": None})

    def drill_of(self, method: str) -> Drill | None:
        """Of the last method: the others need all servers after them."""
        return self.drill_plan if method == self.method_names[-1] else None

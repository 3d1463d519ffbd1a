"""What a user says of a cluster, checked without JAX."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from moe_edge.cluster import roles
from moe_edge.cluster.drills import Drill, parse_drill
from moe_edge.cluster.modes import SERVERS, modes
from moe_edge.cluster.transport.base import HUNG_S
from moe_edge.core.checks import (
    ConfigError,
    check_count,
    check_known,
    check_positive,
    chosen,
)
from moe_edge.core.files import check_there
from moe_edge.place.migration_policy import MigrationRule
from moe_edge.place.placer import (
    ALONE,
    METHODS,
    PLACERS,
    Placer,
    PlacerOptions,
    get_placer,
    listed_placers,
)
from moe_edge.route.base import Route, get_route
from moe_edge.training.generators import FAMILIES

# What a process goes by that is not the scheduler.
SHARED = (
    *("mode", "servers", "slots", "max_batch", "period_s", "call_s", "hung_s"),
    *("workers", "groups", "worker_layers", "shadow"),
    *("token_period", "kv_period", "departure", "seed"),
    *("k", "route", "route_options"),
)
MAX_SERVERS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """A cluster and what it serves.

    Attributes:
      checkpoint: folder (Hugging Face's or ours), GGUF file, or `default`, the model in
        the package; the same on all machines.
      mode: prism (servers that hold blocks and ask each other) or od_moe (a main node,
        a shadow, and workers that load blocks on demand).
      servers: number of servers; the scheduler is one process more.
      slots: experts that each server holds, separated by commas; None: 1.3 copies of
        the model, shared equally. One slot of each stays free for experts that are read
        for a single call; with migration another one, for experts on their way.
      k: experts that a token computes (sub-experts in a refactored model); None: as
        many as the model was made for.
      route: chooses what a decode step computes, by name: with a lossy one (substitute,
        prefer, drop) an expert of another server may give way to one that is here.
        Results then state the share of choices that changed.
      route_options: of the route.
      methods: placers, separated by commas; each serves all requests in turn. Also
        moe_infinity (every server serves alone and loads what its slots lack from its
        own host memory) and moe_infinity_lb (busy ones pass requests on to idle ones).
      placer_options: {name: {option: value}} of placers.
      placement: stem of a placement (`moe-edge place_experts`), instead of methods.
      workload: synthetic requests: the task family of each server, separated by commas
        (arithmetic, words, stories, tables).
      requests_per_server: with `workload`: number of requests of each server.
      interval_s: with `workload`: mean seconds between two requests of a server.
      output_tokens: with `workload`: most new tokens of a request.
      prompts: JSON-lines file `{"id", "prompt", "server"}`, instead of `workload`;
        lines without "server" go to the servers in turn. All requests arrive at once.
      max_new_tokens: with `prompts`: most new tokens of a request.
      max_batch: requests that a server runs at a time; they take turns.
      period_s: seconds between two decisions whether to migrate experts; 0: never.
      keep: with migration: share of the statistics that is kept after a period.
      hysteresis: with migration: by which share of its cost the gain must exceed it.
      source: where migrating blocks come from: host (the server's own checkpoint) or
        network (a server that holds them).
      link_mbps: limit of every server's network link, set by `tc` (needs root); None:
        no limit.
      host_bytes_per_s: emulated rate of each server's link to its host memory, for
        methods without calls; None: as fast as it is.
      call_s: time limit of a call to another server; after it the call is repeated with
        longer ones.
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
      workers: od_moe: number of workers.
      groups: od_moe: number of groups of workers, of equal size; one computes while the
        others load.
      worker_layers: od_moe: slots of a worker, in multiples of its share of a layer; 1
        as in the paper; with 2 the next experts arrive while it computes.
      shadow: od_moe: precision of the model that predicts: full, fp16, bf16, int8, nf4;
        or random (experts by chance), or none.
      token_period: od_moe: steps between two alignments of the shadow's token; 0:
        never.
      kv_period: od_moe: steps between two alignments of the shadow's KV cache; 0:
        never.
      departure: od_moe: late (the shadow waits for the aligned token) or speculative
        (it goes on with its own, and starts over if that was another one).
      load_bytes_per_s: od_moe: rate of each worker's link; `balanced`: such that a load
        just causes no stall, from times measured first.
      seed: of requests and placements.
    """

    checkpoint: str = "default"
    mode: str = "prism"
    servers: int = 3
    slots: str | None = None
    k: int | None = None
    route: str = "topk"
    route_options: Mapping[str, Any] | None = None
    methods: str = "optimal"
    placer_options: PlacerOptions | None = None
    placement: str | None = None
    workload: str | None = None
    requests_per_server: int = 4
    interval_s: float = 1.0
    output_tokens: int = 32
    prompts: str | None = None
    max_new_tokens: int = 64
    max_batch: int = 1
    period_s: float = 0.0
    keep: float = 1.0
    hysteresis: float = 0.05
    source: str = "host"
    link_mbps: float | None = None
    host_bytes_per_s: float | None = None
    call_s: float = 5.0
    hung_s: float = HUNG_S
    secret_file: str | None = None
    coordinator: str | None = None
    process_id: int | None = None
    join_timeout_s: float = 30.0
    drill: str | None = None
    cores: str | None = None
    gpus: str | None = None
    workers: int = 4
    groups: int = 2
    worker_layers: int = 2
    shadow: str = "int8"
    token_period: int = 1
    kv_period: int = 1
    departure: str = "speculative"
    load_bytes_per_s: str = "balanced"
    seed: int = 0

    def __post_init__(self):
        """Raises ConfigError for what no cluster can be."""
        check_known("mode", self.mode, (SERVERS, *modes()))
        MigrationRule(self.period_s, self.keep, self.source, self.hysteresis)
        counts = "servers", "requests_per_server", "output_tokens", "max_new_tokens"
        for name in (*counts, "max_batch"):
            check_count(name, getattr(self, name))
        if self.servers > MAX_SERVERS:
            raise ConfigError(f"servers is {self.servers}, expected 1 to {MAX_SERVERS}")
        for name in ("interval_s", "join_timeout_s", "call_s"):
            check_positive(name, getattr(self, name))
        if not 0.5 <= self.hung_s <= 3600:
            raise ConfigError(
                f"--hung_s is {self.hung_s}, expected 0.5 to 3600 seconds; give 2 or "
                "more on a wired network, 10 or more on Wi-Fi"
            )
        if self.link_mbps is not None:
            check_positive("link_mbps", self.link_mbps)
        if self.host_bytes_per_s is not None:
            check_positive("host_bytes_per_s", self.host_bytes_per_s)
        self._check_asked()
        self._check_names()
        self._check_joining()
        for mode in modes().values():
            mode.check(self)

    def _check_asked(self) -> None:
        if self.is_scheduler:  # others need no requests
            if (self.workload is None) == (self.prompts is None):
                got = "neither" if self.workload is None else "both"
                raise ConfigError(f"give either --workload or --prompts, got {got}")
            if self.prompts is not None:
                check_there(self.prompts, "--prompts")

    def _check_names(self) -> None:
        if not isinstance(self.methods, str):
            raise ConfigError(
                f"methods is {self.methods!r:.60}, and the processes of a cluster know "
                "names alone; install the placer as a package (docs/plug_ins.md) and "
                "give its name"
            )
        if not isinstance(self.route, str):
            raise ConfigError(
                f"route is {self.route!r:.60}, and the processes of a cluster know "
                "names alone; install the route as a package (docs/plug_ins.md) and "
                "give its name"
            )
        self.chosen_route  # noqa: B018  refuses what cannot be
        if self.placement is None:
            listed_placers(self.methods, self.placer_options, ALONE)
        elif self.is_scheduler:
            for ending in ("npy", "json"):
                check_there(f"{self.placement}.{ending}", "--placement")
        if self.workload is not None:
            families = self.families
            for family in families:
                check_known("workload", family, FAMILIES)
            if self.mode == "prism" and len(families) != self.servers:
                raise ConfigError(
                    f"--workload names {len(families)} task families, expected one for "
                    f"each of the {self.servers} servers"
                )
        self.drill_plan  # noqa: B018  refuses what cannot be

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
    def is_scheduler(self) -> bool:
        """Whether the scheduler is started here."""
        return self.process_id in (None, 0)

    @property
    def shared(self) -> dict:
        """What must be the same in all processes."""
        return {name: getattr(self, name) for name in SHARED}

    @property
    def processes(self) -> int:
        """How many there are, the scheduler among them."""
        return 1 + (self.servers if self.mode == "prism" else 2 + self.workers)

    def name_of(self, process: int) -> str:
        """Of a process: in logs, namespaces and drills."""
        return roles.name_of(self.mode, process)

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
    def method_names(self) -> list[str]:
        """What is run, in order."""
        if self.placement is not None:
            return ["given"]
        return list(chosen("method", self.methods, METHODS) or PLACERS)

    def placer(self, name: str) -> Placer:
        """The placer of a method, with its options."""
        return get_placer(name, **(self.placer_options or {}).get(name, {}))

    @property
    def chosen_route(self) -> Route:
        """What decode steps compute."""
        return get_route(self.route, **(self.route_options or {}))

    @property
    def serves_alone(self) -> bool:
        """Whether some method needs servers that ask nobody."""
        return self.mode == "prism" and not ALONE.keys().isdisjoint(self.method_names)

    @property
    def drill_plan(self) -> Drill | None:
        """The drill, or None."""
        if self.drill is None:
            return None
        known = {str(n): n for n in range(self.servers)}
        if self.mode == "od_moe":
            known = {self.name_of(n + 1): n for n in range(self.processes - 1)}
        return parse_drill(self.drill, known | {"scheduler": None})

    def drill_of(self, method: str) -> Drill | None:
        """Of the last method: the others need all servers after them."""
        return self.drill_plan if method == self.method_names[-1] else None


class ServedOptions(ClusterOptions):
    """The same where requests come over HTTP."""

    def _check_asked(self) -> None:
        """Nobody knows yet what will be asked."""

"""What a user says of servers that ask each other, checked without JAX."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from moe_edge.cluster.modes import Mode
from moe_edge.cluster.options import ClusterOptions, check_name
from moe_edge.cluster.roles import FIRST
from moe_edge.core.checks import ConfigError, check_count, check_positive, chosen
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrismOptions(ClusterOptions):
    """Servers that hold blocks and ask each other.

    Attributes:
      slots: experts that each server holds, separated by commas; None: 1.3 copies of
        the model, shared equally. One slot of each stays free for experts that are read
        for a single call; with migration another one, for experts on their way.
      methods: placers, separated by commas; each serves all requests in turn. Also
        moe_infinity (every server serves alone and loads what its slots lack from its
        own host memory) and moe_infinity_lb (busy ones pass requests on to idle ones).
      placer_options: {name: {option: value}} of placers.
      placement: stem of a placement (`moe-edge place_experts`), instead of methods.
      max_batch: requests that a server runs at a time; they take turns.
      period_s: seconds between two decisions whether to migrate experts; 0: never.
      keep: with migration: share of the statistics that is kept after a period.
      hysteresis: with migration: by which share of its cost the gain must exceed it.
      source: where migrating blocks come from: host (the server's own checkpoint) or
        network (a server that holds them).
      host_bytes_per_s: emulated rate of each server's link to its host memory, for
        methods without calls; None: as fast as it is.
      call_s: time limit of a call to another server; after it the call is repeated with
        longer ones.
    """

    SHARED = (*ClusterOptions.SHARED, "slots", "max_batch", "period_s", "call_s")
    FILES = (*ClusterOptions.FILES, "placement")
    one_home, several_gpus, few_threads = False, True, False

    mode: str = "prism"
    slots: str | None = None
    methods: str = "optimal"
    placer_options: PlacerOptions | None = None
    placement: str | None = None
    max_batch: int = 1
    period_s: float = 0.0
    keep: float = 1.0
    hysteresis: float = 0.05
    source: str = "host"
    host_bytes_per_s: float | None = None
    call_s: float = 5.0

    def __post_init__(self):
        """Raises ConfigError for what these servers cannot be."""
        MigrationRule(self.period_s, self.keep, self.source, self.hysteresis)
        check_count("max_batch", self.max_batch)
        check_positive("call_s", self.call_s)
        if self.host_bytes_per_s is not None:
            check_positive("host_bytes_per_s", self.host_bytes_per_s)
        self._check_methods()
        super().__post_init__()
        if self.workload is not None and len(self.families) != self.servers:
            raise ConfigError(
                f"--workload names {len(self.families)} task families, expected one "
                f"for each of the {self.servers} servers"
            )

    def _check_methods(self) -> None:
        check_name("methods", self.methods, "placer")
        if self.placement is None:
            listed_placers(self.methods, self.placer_options, ALONE)
        elif self.is_scheduler:
            for ending in ("npy", "json"):
                check_there(f"{self.placement}.{ending}", "--placement")

    @property
    def processes(self) -> int:
        return 1 + self.servers

    def role_of(self, process: int) -> str:
        return f"server{process - FIRST}"

    @property
    def names_in_drills(self) -> dict[str, int]:
        """Servers go by their numbers."""
        return {str(n): n for n in range(self.servers)}

    def result_of(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        keys = "failures", "bad_pairs", "lost_requests", "degraded"
        keys += "compiled_after_warmup", "same_tokens"
        return {"methods": facts["rows"]} | {key: facts[key] for key in keys}

    @property
    def method_names(self) -> list[str]:
        if self.placement is not None:
            return ["given"]
        return list(chosen("method", self.methods, METHODS) or PLACERS)

    def placer(self, name: str) -> Placer:
        """The placer of a method, with its options."""
        return get_placer(name, **(self.placer_options or {}).get(name, {}))

    @property
    def serves_alone(self) -> bool:
        """Whether some method needs servers that ask nobody."""
        return not ALONE.keys().isdisjoint(self.method_names)


class ServedOptions(PrismOptions):
    """The same where requests come over HTTP."""

    def _check_asked(self) -> None:
        """Nobody knows yet what will be asked."""


MODE = Mode(
    PrismOptions,
    "moe_edge.cluster.prism.server:make_server",
    "moe_edge.cluster.prism.programme:PrismProgramme",
    "moe_edge.cluster.prism.model_checks:check",
)

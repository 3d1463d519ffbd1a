"""What a user says of OD-MoE's processes, checked without JAX."""

import dataclasses

from moe_edge.cluster.modes import Mode
from moe_edge.cluster.options import ClusterOptions
from moe_edge.cluster.roles import FIRST_WORKER, MAIN
from moe_edge.core.checks import (
    ConfigError,
    check_count,
    check_from_zero,
    check_known,
    check_positive,
)
from moe_edge.papers.od_moe.shadow.predictor import PRECISIONS

DEPARTURES = ("late", "speculative")
BALANCED = "balanced"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OdMoeOptions(ClusterOptions):
    """A main node, a shadow that predicts, and workers that load blocks on demand.

    Attributes:
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
    """

    SHARED = (
        *(*ClusterOptions.SHARED, "workers", "groups", "worker_layers", "shadow"),
        *("token_period", "kv_period", "departure"),
    )

    mode: str = "od_moe"
    workers: int = 4
    groups: int = 2
    worker_layers: int = 2
    shadow: str = "int8"
    token_period: int = 1
    kv_period: int = 1
    departure: str = "speculative"
    load_bytes_per_s: str = "balanced"

    def __post_init__(self):
        """Raises ConfigError for workers, shadows and loads that cannot be."""
        check_known("shadow", self.shadow, (*PRECISIONS, "random", "none"))
        check_known("departure", self.departure, DEPARTURES)
        for name in ("workers", "groups", "worker_layers"):
            check_count(name, getattr(self, name))
        for name in ("token_period", "kv_period"):
            check_from_zero(name, getattr(self, name))
        super().__post_init__()
        if not self.chosen_route.lossless:
            raise ConfigError(
                f"route {self.route} prefers experts that are in slots, and workers of "
                "od_moe load each expert for the token that chose it; use route topk, "
                "or mode prism"
            )
        if self.workers % self.groups:
            raise ConfigError(
                f"--groups {self.groups} does not divide --workers {self.workers}; "
                "groups are of equal size"
            )
        if self.load_bytes_per_s != BALANCED:
            try:
                check_positive("load_bytes_per_s", float(self.load_bytes_per_s))
            except ValueError as error:
                raise ConfigError(
                    f"--load_bytes_per_s is {self.load_bytes_per_s!r}, expected a "
                    f"positive number or {BALANCED}"
                ) from error

    @property
    def processes(self) -> int:
        return 3 + self.workers

    def role_of(self, process: int) -> str:
        if process >= FIRST_WORKER:
            return f"worker{process - FIRST_WORKER}"
        return "main" if process == MAIN else "shadow"


MODE = Mode(
    OdMoeOptions,
    "moe_edge.papers.od_moe.cluster.nodes:make_node",
    "moe_edge.papers.od_moe.cluster.programme:OdProgramme",
)

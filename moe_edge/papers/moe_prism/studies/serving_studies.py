"""MoE-Prism's study of serving: figures 7 and 12, from the same requests."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from moe_edge.bench.registry import later
from moe_edge.bench.settings import Positive, known
from moe_edge.bench.study import Study
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.frames import Tables, frame
from moe_edge.papers.moe_prism.studies import making
from moe_edge.papers.moe_prism.studies.models import LG, ORIGINAL, Made, ModelSettings

MEASURED, SAME, COMPUTED = "measured", "same requests, computed", "computed"
AT_ONCE_LABEL = "all at once"


class System(NamedTuple):
    """A model with a policy."""

    model: str
    policy: str


FIFO, PRISM, OURS = "FIFO", "MoE-Prism", "continuous"
OURS_ORIGINAL, MODEL_ONLY, SCHEDULER_ONLY = (
    *("continuous, original", "model only", "scheduler only"),
)
SYSTEMS: Mapping[str, System] = {
    FIFO: System(ORIGINAL, "fifo"),
    "FullBatch": System(ORIGINAL, "full_batch"),
    MODEL_ONLY: System(LG, "fifo"),
    SCHEDULER_ONLY: System(ORIGINAL, "qos"),
    PRISM: System(LG, "qos"),
    OURS_ORIGINAL: System(ORIGINAL, "continuous"),
    "one K, original": System(ORIGINAL, "continuous_one_k"),
    "one K": System(LG, "continuous_one_k"),
    OURS: System(LG, "continuous"),
    "elastic": System(LG, "elastic"),
}
SystemName = Annotated[str, known("system", SYSTEMS)]
# What one part brings: a system and the one that lacks only that part.
PARTS: Sequence[tuple[str, str, str]] = (
    ("our loop", OURS_ORIGINAL, FIFO),
    ("sub-experts in our loop", OURS, OURS_ORIGINAL),
    ("sub-experts at one K for all", "one K", "one K, original"),
    ("MoE-Prism's scheduler", SCHEDULER_ONLY, FIFO),
    ("sub-experts under FIFO", MODEL_ONLY, FIFO),
    ("sub-experts under MoE-Prism's scheduler", PRISM, SCHEDULER_ONLY),
)


def check_systems(systems: Sequence[str]) -> None:
    """Raises ConfigError for a system named twice, or none beside the first one."""
    if len(set(systems)) < len(systems):
        raise ConfigError(f"systems {list(systems)} name one twice")
    if len(systems) < 2:
        raise ConfigError(
            f"systems are {list(systems)}, expected two at least: all are compared "
            "with the first one"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingStudySettings(ModelSettings):
    """Who serves what; `ModelSettings` names the rest.

    Attributes:
      systems: of SYSTEMS, the first one sets the rates.
      floors: sub-experts a token that requests ask for at least, all alike often; the
        original runs the next whole number of experts.
      loads: rates over the one that the first system sustains; besides, all requests
        come at once.
      duration_s: for how long requests come, in each measured run; computed_s: in each
        computed one.
      rounds: of measured and of computed runs, each with requests of its own.
      prompt_tokens, output_tokens: means, log-normal.
      max_batch, max_context, max_wait_s: of the servers.
      slo_ttft_ms, slo_tpot_ms: what in time means.
    """

    make: Made = ("lg",)
    systems: Sequence[SystemName] = tuple(SYSTEMS)
    floors: Sequence[int] = tuple(range(4, 33))
    loads: Sequence[Positive] = (0.4, 0.7, 1.0)
    duration_s: Positive = 60.0
    computed_s: Positive = 300.0
    rounds: int = 3
    prompt_tokens: int = 32
    output_tokens: int = 48
    max_batch: int = 8
    max_context: int = 512
    max_wait_s: float = 1.0
    slo_ttft_ms: float = 500.0
    slo_tpot_ms: float = 20.0

    def __post_init__(self):
        super().__post_init__()
        check_systems(self.systems)


FRAMES = {
    "sustained": frame("system", "rate:requests/s"),
    "figures": frame(
        "kind load system",
        "throughput:requests/s ttft_ms ttft_p95_ms tpot_ms e2e_ms in_time mean_k",
    ),
    "gains": frame("figure kind load system over", "gain"),
    "differences": frame("figure system load", "error allowed"),
}


def derive(tables: Tables) -> dict[str, Any]:
    """The system that serves most, and what every system and part brings."""
    figures, gains = tables["figures"], tables["gains"]
    base = tables["sustained"].system[0]
    full = figures[(figures.kind == MEASURED) & (figures.load == AT_ONCE_LABEL)]
    most = full.loc[full.throughput.idxmax()]
    measured = gains[(gains.kind == MEASURED) & (gains.figure == "throughput")]
    over = measured[(measured.over == base) & (measured.load == AT_ONCE_LABEL)]
    part_of = {(system, without): part for part, system, without in PARTS}
    pairs = zip(gains.system, gains.over, strict=True)
    each = gains.assign(part=[part_of.get(pair, "") for pair in pairs])
    is_shown = each.figure.isin(["throughput", "TPOT"]) & (each.kind == MEASURED)
    off = tables["differences"].to_dict("records")
    return {
        "base": base,
        "top": gains[gains.load != AT_ONCE_LABEL].load.iloc[0],
        "best": most.to_dict(),
        "over_best": full[["system"]].assign(over=full.throughput / most.throughput),
        "best_gain": over[over.system == most.system],
        "scheduler": over[(over.system == PRISM) & (most.system != PRISM)],
        "parts": each[is_shown & (each.part != "")],
        "off": off,
        "checks": {
            f"computed {one['figure']} within {one['allowed']:.0%} of measured": (
                one["error"] <= one["allowed"]
            )
            for one in off
        },
    }


STUDY = Study(
    "moe_prism_fig12",
    ServingStudySettings,
    later("papers.moe_prism.studies.serving.measure"),
    FRAMES,
    derive,
    check=making.check_inputs,
)

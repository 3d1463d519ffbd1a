"""MoE-Prism's studies of serving: figures 7 and 12."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moe_edge.bench.registry import later
from moe_edge.bench.settings import RULES
from moe_edge.bench.study import Claim, Study
from moe_edge.core.checks import ConfigError, check_known, check_positive
from moe_edge.papers.moe_prism.studies import making
from moe_edge.papers.moe_prism.studies.models import LG, ORIGINAL, ModelSettings


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
# What one part brings: a system and the one that lacks only that part.
PARTS: Sequence[tuple[str, str, str]] = (
    ("our loop", OURS_ORIGINAL, FIFO),
    ("sub-experts in our loop", OURS, OURS_ORIGINAL),
    ("sub-experts at one K for all", "one K", "one K, original"),
    ("MoE-Prism's scheduler", SCHEDULER_ONLY, FIFO),
    ("sub-experts under FIFO", MODEL_ONLY, FIFO),
    ("sub-experts under MoE-Prism's scheduler", PRISM, SCHEDULER_ONLY),
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

    rules = RULES | {
        "systems": lambda name, value: check_known("system", value, SYSTEMS),
        "loads": check_positive,
        "duration_s": check_positive,
        "computed_s": check_positive,
    }
    make: tuple[str, ...] = ("lg",)
    systems: Sequence[str] = (
        *(FIFO, "FullBatch", PRISM),
        *("one K, original", "one K", OURS_ORIGINAL, OURS, "elastic"),
    )
    floors: Sequence[int] = tuple(range(4, 33))
    loads: Sequence[float] = (0.4, 0.7, 1.0)
    duration_s: float = 60.0
    computed_s: float = 300.0
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
        if len(set(self.systems)) < len(self.systems):
            raise ConfigError(f"systems {list(self.systems)} name one twice")


PAPER_GAIN = {"DeepSeek-V2-Lite": 15.59 / 13 - 1, "OLMoE": 17.89 / 15.57 - 1}
SAME_REQUESTS = (
    "Ranges are by round, within one start. Figures 7 and 12 serve the same 96 "
    "requests at once, measured on two days, and the same ratio differs by more "
    "between them than between rounds: MoE-Prism's scheduler with sub-experts has no "
    "effect that could be told from zero."
)
WHY = (
    "The paper serves batches of up to 256 on a GPU. On two CPU cores eight rows at "
    "the model's K run only about twice as fast as one after the other, and "
    "experts are a part of a step only, so that a smaller K saves less."
)
FIG7 = Study(
    name="moe_prism_fig7",
    question="How do schedulers serve requests of mixed floors (MoE-Prism, fig. 7)?",
    settings=ServingStudySettings,
    measure=later("papers.moe_prism.studies.serving.run"),
    check=making.check_inputs,
    claim=Claim(
        source="MoE-Prism, section 6.2.2 and fig. 7, high load",
        paper={
            f"throughput over FIFO, {name}": f"{gain:+.1%}"
            for name, gain in PAPER_GAIN.items()
        },
        why=WHY,
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fig12Settings(ServingStudySettings):
    """As figure 7, with the parts of MoE-Prism one by one, and of ours."""

    systems: Sequence[str] = (
        *(FIFO, MODEL_ONLY, SCHEDULER_ONLY, PRISM),
        *(OURS_ORIGINAL, OURS),
    )
    loads: Sequence[float] = (1.0,)


FIG12 = Study(
    name="moe_prism_fig12",
    question="What do sub-experts and the scheduler each bring (MoE-Prism, fig. 12)?",
    settings=Fig12Settings,
    measure=later("papers.moe_prism.studies.serving.run"),
    check=making.check_inputs,
    claim=Claim(
        source="MoE-Prism, section 6.3.3 and fig. 12",
        paper={"order": "each alone better than FIFO, both together best"},
        why=WHY,
    ),
)
STUDIES = {study.name: study for study in (FIG7, FIG12)}

"""How far plans are off: of time alone, of other prompts, and of the choice."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from moe_edge.bench.registry import later
from moe_edge.bench.settings import (
    Budget,
    FromZero,
    Positive,
    Seed,
    Steps,
    StudySettings,
)
from moe_edge.bench.study import Study
from moe_edge.convert.open import open_checkpoint
from moe_edge.metrics.frames import Tables, frame

# Of a step's time, measured over computed: most at the median and at the worst.
OWN_LOOKUPS, OTHER_PROMPTS = (0.05, 0.15), (0.10, 0.25)
NEAR, OFTEN = 0.10, 0.80  # of the best, in this share of the plans


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorSettings(StudySettings):
    """What is planned and run.

    Attributes:
      checkpoint: folder, GGUF file or `default`.
      links: bytes a second; each is calibrated once, at the middle budget.
      link_latency_s: of a transfer.
      budgets: device memory, planned with each link; at the middle one of the first
        link also without CPU assists.
      prompts_seed: of the prompts that a plan has not seen; of those it has: `seed`.
      prompt_tokens, new_tokens: of each of 16 prompts.
      temperature: at which tokens are drawn.
      next_ones: configurations that run beside the chosen one.
      work_dir: where finished links are kept; what is there is not measured again, so
        that a run that was killed goes on.
    """

    checkpoint: str = "default"
    links: Sequence[Positive] = (1200e6, 600e6)
    link_latency_s: FromZero = 50e-6
    budgets: Sequence[Budget] = ("15%", "25%", "50%")
    prompts_seed: Seed = 1000
    prompt_tokens: int = 64
    new_tokens: Steps = 24
    temperature: FromZero = 1.0
    next_ones: int = 4
    work_dir: str = "results/local/planner_errors"
    seed: Seed = 0


def check(settings: ErrorSettings) -> None:
    """Refuses a checkpoint that cannot be used."""
    open_checkpoint(settings.checkpoint)


def derive(tables: Tables) -> dict[str, Any]:
    """Median and worst error, and how often the choice is near the best."""
    runs, plans = tables["runs"], tables["plans"]
    own, other = runs.own.dropna().abs(), runs.other.abs()
    near = float((plans.behind <= NEAR).mean())
    found = {
        "own_median": float(own.median()),
        "own_worst": float(own.max()),
        "other_median": float(other.median()),
        "other_worst": float(other.max()),
        "slower": float((runs.other > 0).mean()),
        "inside": float(runs.measured_ms.between(runs.low_ms, runs.high_ms).mean()),
        "near": near,
        "again": float(plans.again.abs().max()) if "again" in plans else None,
    }
    found["checks"] = {
        "own lookups: median at most 5 %": found["own_median"] <= OWN_LOOKUPS[0],
        "own lookups: worst at most 15 %": found["own_worst"] <= OWN_LOOKUPS[1],
        "other prompts: median at most 10 %": found["other_median"] <= OTHER_PROMPTS[0],
        "other prompts: worst at most 25 %": found["other_worst"] <= OTHER_PROMPTS[1],
        "chosen within 10 % of the best of five in 80 %": near >= OFTEN,
        "searched in at most 60 s": float(plans.search_s.max()) <= 60,
    }
    return found


FRAMES = {
    "runs": frame(
        "link budget rank plan",
        "low_ms predicted_ms high_ms measured_ms own other hits first",
    ),
    "plans": frame("link budget", "behind again search_s replays"),
    "costs": frame("link predictor", "here_ms own_us:us/block link_us:us/block"),
}
STUDY = Study(
    "planner_errors",
    ErrorSettings,
    later("studies.planning.measured.measure"),
    FRAMES,
    derive,
    check=check,
    inline=True,
)

"""Which shape the default model has: short trials of some, by what papers assume."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated, Any

from moe_edge.bench.registry import later
from moe_edge.bench.settings import FromZero, Margin, Seed, StudySettings, by
from moe_edge.bench.study import Study
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.frames import Tables, frame

FORM = re.compile(r"(\d+)/(\d+)/(\d+)( raw)?")
WANTED_FALL = (1.8, 4.0)  # weight of the first rank over that of the last


@dataclasses.dataclass(frozen=True)
class Shape:
    """Experts of a layer, chosen ones, neurons of each; weights that add up to 1."""

    num_experts: int
    top_k: int
    expert_dim: int
    norm_topk: bool


def parse_shape(text: str) -> Shape:
    """`64/8/64`: experts / chosen / neurons of each; ` raw`: weights as they are.

    Raises:
      ConfigError: another form.
    """
    found = FORM.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"shape is {text!r}, expected experts/chosen/neurons such as '64/8/64' or "
            "'64/8/64 raw'"
        )
    return Shape(*map(int, found.groups()[:3]), norm_topk=found[4] is None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapeSettings(StudySettings):
    """The size of the trials.

    Attributes:
      shapes: see `parse_shape`.
      train_tokens: of a trial, the last quarter with a falling rate; batch_tokens: of
        a step.
      balance: weight of the load-balancing loss.
      margins: a of SMoE.
      rows: held-out sequences of a domain.
      sub_experts: of an expert; calibration, calibration_tokens: of its profile.
      traces: of real models, for comparison; trace_experts: of a layer of theirs.
      data_dir: where relative paths are looked up.
      work_dir: where trials are kept; what is there is not trained again.
    """

    shapes: Sequence[Annotated[str, by(parse_shape)]] = (
        *("64/8/64", "64/8/64 raw", "32/4/128", "32/4/128 raw"),
        *("16/4/256", "16/4/256 raw"),
    )
    train_tokens: int = 2_000_000
    batch_tokens: int = 1024
    balance: FromZero = 0.01
    margins: Sequence[Margin] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    rows: int = 16
    sub_experts: int = 4
    calibration: Sequence[str] = ("text/wikitext-2/train.txt", "text/c4_web.txt")
    calibration_tokens: int = 65_536
    traces: Sequence[str] = (
        "routing/trace_qwen3_30b_a3b.csv.gz",
        "routing/trace_gemma4_26b_a4b.csv.gz",
    )
    trace_experts: int = 128
    data_dir: str = "../shared/data"
    work_dir: str = "results/local/default_shapes"
    seed: Seed = 0


def derive(tables: Tables) -> dict[str, Any]:
    """The shape of the lowest loss among those whose weights fall as real ones do."""
    shapes = tables["shapes"]
    trials = shapes[shapes.loss.notna()]
    low, high = WANTED_FALL
    real = trials[trials.fall.between(low, high)]
    return {"trials": trials, "chosen": real.nsmallest(1, "loss")}


FRAMES = {
    "shapes": frame(
        "of",
        "loss:nats/token half_cost usage_ratio fall gain own fixed "
        "independent parameters tokens_per_s:tokens/s",
    ),
    "margins": frame("of a", "top alternatives seen"),
}
STUDY = Study(
    "default_shapes",
    ShapeSettings,
    later("studies.default_model.trials.measure"),
    FRAMES,
    derive,
)

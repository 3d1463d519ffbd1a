"""Studies of OD-MoE's shadow (arXiv 2512.03927): settings, questions, claims."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated

from moe_edge.bench.prompts import LinkSettings, PromptSettings, check_inputs
from moe_edge.bench.registry import later
from moe_edge.bench.settings import Budget, Positive, Steps, known
from moe_edge.bench.study import Study
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.frames import Frame, frame
from moe_edge.papers.od_moe.shadow.predictor import PRECISIONS

BARS = {"fp16": 0.999, "int8": 0.995, "nf4": 0.98}  # of ours, aligned at every step
PAPER = {"fp16": 0.9994, "int8": 0.9734, "nf4": 0.9567}  # section 3.2, likewise


Precision = Annotated[str, known("shadow precision", PRECISIONS)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallSettings(PromptSettings):
    """`PromptSettings` names the rest; every round is one sequence.

    Attributes:
      new_tokens: the first comes of the prompt, the others of decode steps.
    """

    sources: Sequence[str] = (
        "prompts/longwriter.jsonl",
        "prompts/alpaca.jsonl",
        "prompts/gsm8k.jsonl",
    )
    rounds: int = 24
    prompt_tokens: int = 32
    new_tokens: Steps = 257


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fig3Settings(RecallSettings):
    """`RecallSettings` names the rest.

    Attributes:
      precisions: of the shadows, each with three alignments.
    """

    precisions: Sequence[Precision] = ("fp16", "int8", "nf4")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fig6Settings(RecallSettings):
    """`RecallSettings` names the rest.

    Attributes:
      precision: of the shadow.
      periods: of tokens and of the KV cache, in all pairs; ascending.
    """

    rounds: int = 12
    precision: Precision = "int8"
    periods: Sequence[int] = (1, 2, 4, 8, 16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table1Settings(LinkSettings, PromptSettings):
    """Its parts name the rest.

    Attributes:
      precisions: of the shadows, aligned at every step.
      device_memory: of every case.
      history: sequences shown beforehand to what learns from past ones.
    """

    sources: Sequence[str] = RecallSettings.sources
    rounds: int = 8
    prompt_tokens: int = 32
    new_tokens: Steps = 65
    precisions: Sequence[Precision] = ("fp16", "bf16", "int8", "nf4")
    device_memory: Budget = "25%"
    history: int = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneMachineSettings(LinkSettings, PromptSettings):
    """Its parts name the rest; its link factor is each of `link_factors` in turn.

    Attributes:
      precisions: of the shadows, aligned at every step.
      budgets: device memory of slots and shadow together, of the experts' bytes.
      link_factors: the standard links.
      horizon: layers ahead that are prefetched with a shadow.
      history: sequences run before, to time a layer.
      fidelity_rows: unused, as every case is lossless.
    """

    rounds: int = 6
    precisions: Sequence[Precision] = ("int8", "nf4")
    budgets: Sequence[Budget] = ("50%", "75%")
    link_factors: Sequence[Positive] = (0.5, 2.0, 8.0)
    horizon: int = 3
    history: int = 4
    fidelity_rows: int = 1

    def __post_init__(self):
        super().__post_init__()
        for budget in self.budgets:
            if not budget.endswith("%"):
                raise ConfigError(
                    f"budgets holds {budget!r}, expected shares of the experts' "
                    "bytes, as 50%"
                )


def _study(name: str, settings: type, frames: Mapping[str, Frame]) -> Study:
    """A study that is measured in a module of its name, which loads JAX."""
    measure, derive = (
        later(f"papers.od_moe.studies.{name}.{step}") for step in ("measure", "derive")
    )
    given = f"od_moe_{name}", settings, measure, frames, derive
    return Study(*given, check=check_inputs)


STUDIES = {
    study.name: study
    for study in (
        _study(
            "fig3",
            Fig3Settings,
            {
                "recall": frame("precision aligned", "recall first_8 last_eighth"),
                "indexes": frame("precision aligned index", "recall"),
            },
        ),
        _study("fig6", Fig6Settings, {"recall": frame("token kv", "recall")}),
        _study(
            "one_machine",
            OneMachineSettings,
            {
                "shadows": frame("precision", "bytes_share token_over"),
                "cases": frame("policy budget link", "tpot_ms hit_ratio over_lru"),
            },
        ),
        _study(
            "table1",
            Table1Settings,
            {"recall": frame("policy", "recall where_named precision")},
        ),
    )
}

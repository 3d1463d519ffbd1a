"""Studies of OD-MoE's shadow (arXiv 2512.03927): settings, questions, claims."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from moe_edge.bench.prompts import LinkSettings, PromptSettings, check_inputs
from moe_edge.bench.registry import later
from moe_edge.bench.settings import RULES, Rules
from moe_edge.bench.study import Claim, Study
from moe_edge.core.checks import ConfigError, check_known, check_positive
from moe_edge.papers.od_moe.shadow.predictor import PRECISIONS

BARS = {"fp16": 0.999, "int8": 0.995, "nf4": 0.98}  # of ours, aligned at every step
PAPER = {"fp16": 0.9994, "int8": 0.9734, "nf4": 0.9567}  # section 3.2, likewise
WHY = (
    "The paper's model is Mixtral-8x7B in float32, which chooses 2 of 8 experts in "
    "each of 32 layers; ours 8 of 64 in 6 layers. Its INT8 and NF4 are a library's, "
    "which it does not describe. Ours round weights only; routers, norms, embedding "
    "and shared expert stay as stored, and an nf4 shadow's attention is int8. Our "
    "fp16 rounds activations too: our checkpoint is bfloat16, whose weights fp16 "
    "holds exactly."
)


def check_precision(name: str, value: str) -> None:
    """Raises ConfigError for a shadow precision that does not exist."""
    check_known("shadow precision", value, PRECISIONS)


SHADOW_RULES = {**RULES, "precision": check_precision, "precisions": check_precision}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallSettings(PromptSettings):
    """`PromptSettings` names the rest; every round is one sequence.

    Attributes:
      new_tokens: the first comes of the prompt, the others of decode steps.
    """

    rules: ClassVar[Rules] = SHADOW_RULES
    sources: Sequence[str] = (
        "prompts/longwriter.jsonl",
        "prompts/alpaca.jsonl",
        "prompts/gsm8k.jsonl",
    )
    rounds: int = 24
    prompt_tokens: int = 32
    new_tokens: int = 257


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fig3Settings(RecallSettings):
    """`RecallSettings` names the rest.

    Attributes:
      precisions: of the shadows, each with three alignments.
    """

    precisions: Sequence[str] = ("fp16", "int8", "nf4")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fig6Settings(RecallSettings):
    """`RecallSettings` names the rest.

    Attributes:
      precision: of the shadow.
      periods: of tokens and of the KV cache, in all pairs; ascending.
    """

    rounds: int = 12
    precision: str = "int8"
    periods: Sequence[int] = (1, 2, 4, 8, 16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table1Settings(LinkSettings):
    """`LinkSettings` names the rest.

    Attributes:
      precisions: of the shadows, aligned at every step.
      device_memory: of every case.
      history: sequences shown beforehand to what learns from past ones.
    """

    rules: ClassVar[Rules] = SHADOW_RULES
    sources: Sequence[str] = RecallSettings.sources
    rounds: int = 8
    prompt_tokens: int = 32
    new_tokens: int = 65
    precisions: Sequence[str] = ("fp16", "bf16", "int8", "nf4")
    device_memory: str = "25%"
    history: int = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneMachineSettings(LinkSettings):
    """`LinkSettings` names the rest; its link factor is each of `link_factors` in turn.

    Attributes:
      precisions: of the shadows, aligned at every step.
      budgets: device memory of slots and shadow together, of the experts' bytes.
      link_factors: the standard links.
      horizon: layers ahead that are prefetched with a shadow.
      history: sequences run before, to time a layer.
      fidelity_rows: unused, as every case is lossless.
    """

    rules: ClassVar[Rules] = {**SHADOW_RULES, "link_factors": check_positive}
    rounds: int = 6
    precisions: Sequence[str] = ("int8", "nf4")
    budgets: Sequence[str] = ("50%", "75%")
    link_factors: Sequence[float] = (0.5, 2.0, 8.0)
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


STUDIES = {
    "od_moe_fig3": Study(
        name="od_moe_fig3",
        question="How well does a shadow name the experts of the coming token, by "
        "output token, precision and alignment (OD-MoE fig. 3)?",
        settings=Fig3Settings,
        measure=later("papers.od_moe.studies.fig3.run"),
        check=check_inputs,
        claim=Claim(
            source="OD-MoE, section 3.2 and fig. 3",
            paper={f"{name}, T1_KV1": value for name, value in PAPER.items()}
            | {"int8, none": "about 0.45, from 1 down to about 0.3 at token 256"},
            why=WHY,
        ),
    ),
    "od_moe_fig6": Study(
        name="od_moe_fig6",
        question="What do longer periods of aligning tokens and KV cache cost in "
        "recall (OD-MoE fig. 6)?",
        settings=Fig6Settings,
        measure=later("papers.od_moe.studies.fig6.run"),
        check=check_inputs,
        claim=Claim(
            source="OD-MoE, fig. 6",
            paper={"T1_KV1": 0.9734, "trend": "recall falls with either period"},
            why="The paper shows the other pairs as a picture without numbers. " + WHY,
        ),
    ),
    "od_moe_one_machine": Study(
        name="od_moe_one_machine",
        question="On one machine, does a shadow's foresight pay for its bytes and its "
        "time, beside LRU with the same memory?",
        settings=OneMachineSettings,
        measure=later("papers.od_moe.studies.one_machine.run"),
        check=check_inputs,
        claim=Claim(
            source="OD-MoE, section 4.4 and table 2",
            paper={"decode speed over fully cached, ten nodes": 0.755},
            why="The paper gives the shadow two GPUs of its own and each worker its "
            "own link. Here one machine does all, so only the foresight is left, and "
            "LRU may keep more experts instead.",
            not_comparable="one machine instead of ten nodes",
        ),
    ),
    "od_moe_table1": Study(
        name="od_moe_table1",
        question="How many of the chosen experts does each predictor name, on one "
        "model and text (OD-MoE table 1)?",
        settings=Table1Settings,
        measure=later("papers.od_moe.studies.table1.run"),
        check=check_inputs,
        claim=Claim(
            source="OD-MoE, table 1",
            paper={f"shadow {name}": value for name, value in PAPER.items()}
            | {"AdapMoE's next gate": 0.86, "DAOP's next gate": 0.84}
            | {"HOBBIT's gates, up to four layers ahead": 0.91},
            why="The paper quotes the others from their own papers, each of another "
            "model and text; here all see the same. A gate cannot name a token's first "
            "layer, which eq. 3 counts. " + WHY,
        ),
    ),
}

"""What the studies of refactored models (MoE-Prism) take, and the models they compare.

ORIGINAL is the parent at k' of its experts; LG and LG-FT its sub-experts with a linear
gate before and after fine-tuning of the router; CG with a proxy gate, untrained. K
counts sub-experts, so the parent at k' computes as many neurons as the others at k' U.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.core.checks import ConfigError, check_count, check_known
from moe_edge.model.config import ModelConfig

ORIGINAL, LG, LG_FT, CG = "original", "LG", "LG-FT", "CG"
DEFAULT_LIMITS = (
    "One tiny model, trained here on two CPU cores: experts of 64 neurons, of which a "
    "sub-expert has 16. Real models have 1,024 neurons an expert and more.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticSettings:
    """The size of a study; not every study reads everything.

    Attributes:
      checkpoint: the parent, path or `default`.
      lg, lg_ft, cg: refactored checkpoints; None leaves one out.
      make: those of them to make, in `work_dir`, unless they are there: by a profile of
        `calibration_tokens` of `calibration`, and for lg_ft fine-tuning with options
        `fine_tuning` on the prose that the default model was trained on.
      data_dir: where relative paths are looked up too.
      texts: files whose perplexity is measured, wikitext-2 with its tokenisation
        undone.
      max_tokens: read of each.
      k_values: sub-experts a token; the parent runs at those that U divides.
      sets, limit, question_tokens: multiple-choice files, questions of each, and the
        most tokens of a question with a choice.
      batches: sequences that decode together.
      rounds: measured repetitions, cases interleaved.
      prompt_tokens, new_tokens: of each sequence.
      budgets: device memory of each case.
      link_factor: time of a whole expert's bytes on the link, in layers of resident
        compute; `link_latency_s` comes on top, for each transfer.
      sources: prompt files of the timed studies.
    """

    checkpoint: str = "default"
    lg: str | None = None
    lg_ft: str | None = None
    cg: str | None = None
    make: Sequence[str] = ()
    work_dir: str = "results/local/moe_prism"
    calibration: Sequence[str] = ("text/wikitext-2/train.txt", "text/c4_web.txt")
    calibration_tokens: int = 131_072
    fine_tuning: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    data_dir: str | None = None
    texts: Sequence[str] = ("text/wikitext-2/test.txt",)
    max_tokens: int = 8192
    k_values: Sequence[int] = (4, 8, 12, 16, 20, 24, 28, 32)
    sets: Sequence[str] = ()
    limit: int = 60
    question_tokens: int = 256
    batches: Sequence[int] = (1, 8)
    rounds: int = 3
    prompt_tokens: int = 48
    new_tokens: int = 24
    budgets: Sequence[str] = ("25%", "50%")
    link_factor: float = 2.0
    link_latency_s: float = 50e-6
    sources: Sequence[str] = ("prompts/gsm8k.jsonl", "mcq/boolq.jsonl")

    def __post_init__(self):
        for name in (
            *("max_tokens", "limit", "question_tokens", "rounds", "prompt_tokens"),
            *("new_tokens", "calibration_tokens"),
        ):
            check_count(name, getattr(self, name))
        for gate in self.make:
            check_known("gate", gate, ("lg", "lg_ft", "cg"))
        for name in ("k_values", "batches", "texts"):
            values = getattr(self, name)
            if isinstance(values, str) or not len(values):
                raise ConfigError(f"{name} is {values!r}, expected a list of values")
        for name in ("k_values", "batches"):
            for value in getattr(self, name):
                check_count(name, value)

    def limits(self) -> list[str]:
        """What is known of the default model and of no other."""
        return list(DEFAULT_LIMITS) if self.checkpoint == "default" else []

    def why(self, of_default: str) -> str:
        """Why numbers differ from the paper's, as far as it is known."""
        if self.checkpoint == "default":
            return of_default
        return "Another model than the paper's, on another machine."

    def checkpoints(self) -> dict[str, str]:
        """Name -> path of the models that are compared.

        Raises:
          ConfigError: no refactored one.
        """
        known = {LG: self.lg, LG_FT: self.lg_ft, CG: self.cg}
        found = {name: path for name, path in known.items() if path}
        if not found:
            raise ConfigError(
                "no refactored checkpoint given; name those of launch/refactor.py with "
                "--lg, --lg_ft or --cg, or list in `make` what to make"
            )
        return {ORIGINAL: self.checkpoint} | found


def active_neurons(config: ModelConfig) -> int:
    """Neurons of routed experts that a token computes.

    All gate neurons of the chosen parents count in full, though they need no down
    column: they are computed beside the blocks, also where their block is chosen. (In
    prefill one product with all experts' gate neurons is faster than gathering.)
    """
    moe = config.moe
    return moe.top_k * moe.expert_dim + moe.gate_neurons * moe.sub_experts * (
        moe.parent_top_k if moe.has_proxy_gate else 0
    )


def log_interpolate(neurons: float, known: dict[float, float]) -> float | None:
    """Perplexity at so many neurons, between points measured; None outside of them."""
    points = sorted(known.items())
    if not points[0][0] <= neurons <= points[-1][0]:
        return None
    at, values = zip(*points, strict=True)
    return float(np.exp(np.interp(neurons, at, np.log(values))))

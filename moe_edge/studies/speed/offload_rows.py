"""Rows of suite `offload`: a figure beside the bound or peer that its bar refers to."""

import dataclasses
import statistics

import numpy as np

from moe_edge.convert.open import DEFAULT_MODEL
from moe_edge.studies.speed.models import olmoe_config, write_random
from moe_edge.studies.speed.timing import round_ratios

MS = 1e3
SHARE = "25%"  # resident in the rows over emulated links
PROMPT_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much the suite does; tests make it small.

    Attributes:
      hf_config: of the random model that is timed, d = 512.
      large_config: of the model of at least 2 GB.
      link_steps: decode steps by link ratio (expert load / a layer's compute).
      host_steps: of the rows without a link.
      smoe_tokens: decode steps of the SMoE row.
      fidelity_tokens: scored of each held-out text.
      absolute_memory: an absolute budget for the timed model.
    """

    hf_config: dict
    large_config: dict
    link_steps: dict[float, int]
    host_steps: int = 24
    smoe_tokens: int = 48
    fidelity_tokens: int = 256
    absolute_memory: str = "200MiB"


def standard_sizes() -> Sizes:
    """What the suite measures: 0.2 B parameters for time, 1 B for memory."""
    shape = {"hidden_size": 512, "intermediate_size": 256}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    return Sizes(
        hf_config=olmoe_config(8, "bfloat16") | shape | heads,
        large_config=olmoe_config(18, "bfloat16"),
        link_steps={0.5: 32, 2.0: 16, 8.0: 8},
    )


def timed_models(work_dir, sizes: Sizes) -> list[tuple[str, object]]:
    """Name and HF folder of the models that are timed."""
    folder = write_random(work_dir / "olmoe_d512", sizes.hf_config)
    return [("olmoe_d512", folder), ("default", DEFAULT_MODEL)]


def random_prompts(engine, batch: int, tokens: int = PROMPT_TOKENS) -> np.ndarray:
    """int array [batch, tokens] of the model's vocabulary."""
    rng = np.random.default_rng(0)
    return rng.integers(0, engine.config.vocab_size, (batch, tokens))


def make_row(
    case: str,
    ours: list[float],
    bound: list[float],
    bound_name: str,
    unit: str,
    bar: float | None = None,
    emulated: bool = False,
    **extra,
) -> dict:
    """One row: every round's figure beside that round's bound.

    Args:
      ours, bound: a figure a round.
      bar: the ratio that is allowed; `limit_fraction` is the share of it that was
        taken, so up to 1 the bar holds.
      emulated: the case ran over an emulated link.
    """
    ratios = round_ratios(ours, bound)
    ratio = statistics.median(ratios)
    return {
        "case": case,
        "ours": statistics.median(ours),
        "peer": statistics.median(bound),
        "peer_name": bound_name,
        "unit": unit,
        "ratio": ratio,
        "round_ratios": ratios,
        "bar": bar,
        "limit_fraction": None if bar is None else ratio / bar,
        "emulated": emulated,
        "runs": {"ours": ours, "bound": bound},
        **extra,
    }

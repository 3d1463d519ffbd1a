"""OD-MoE, table 2: speed and bytes beside offloading on one machine; what is compared.

Each departure of OD-MoE is booked with its own bytes; the peers get as many as the
largest, and links of the same rate: OD-MoE one a worker, the others one.
`table2_runs.py` measures, `table2_rows.py` tells.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

from moe_edge.bench.offloading import studied
from moe_edge.bench.prompts import (
    PromptPool,
    PromptSettings,
    check_inputs,
    forced_pool,
    make_pool,
    tokenizer_of,
)
from moe_edge.bench.registry import later
from moe_edge.bench.settings import Steps, by
from moe_edge.bench.study import Study
from moe_edge.convert.tokenizer import Tokenizer
from moe_edge.core.checks import ConfigError
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.metrics.frames import frame
from moe_edge.papers.od_moe.studies.live import Departure
from moe_edge.papers.od_moe.studies.studies import Precision
from moe_edge.route.drop import DropAbsent

AHEAD = 4  # layers, of HOBBIT's gates
SPARE = 4  # prompts that are looked at for one that will do
RESIDENT = "resident"
SAME_PROCESSES = "OD-MoE's processes, all experts resident"
STAND_INS = {  # peer -> what of it we run, and what not
    "Mixtral-offloading": "LRU and the next layer's gate on this layer's state; not "
    "its quantised experts and attention",
    "MoE-Infinity": "its paper's eviction and prediction, which its released code does "
    "not use",
    "HOBBIT": f"LRU and the gates of the next {AHEAD} layers; not its low-precision "
    "copies of less important experts, nor its cache's mix of scores",
    "AdapMoE": "its slots by dynamic programming and the next layer's gate; an absent "
    "expert below one share of the token's weights is dropped, in any layer; not its "
    "sensitivities of layers, nor its quantised experts",
}


def peers(hit_curves, top_k: int, threshold: float) -> dict[str, OffloadOptions]:
    """What stands for each peer; `hit_curves` and `top_k` as of `adapmoe_dp`."""
    return {
        "Mixtral-offloading": studied(
            slot_plan="equal",
            predictor="stale_gate",
            predictor_options={"norm": "own"},
        ),
        "MoE-Infinity": studied(eviction="moe_infinity", predictor="moe_infinity"),
        "HOBBIT": studied(
            slot_plan="equal",
            predictor="n_layer_gate",
            predictor_options={"look_ahead": AHEAD},
            horizon=AHEAD,
        ),
        "AdapMoE": studied(
            slot_plan="adapmoe_dp",
            slot_plan_options={"hit_curves": hit_curves, "top_k": top_k},
            predictor="stale_gate",
            route="drop",
            route_options={"threshold": threshold},
        ),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table2Settings(PromptSettings):
    """`PromptSettings` names the rest; every round has prompts of its own.

    Attributes:
      prompt_tokens, new_tokens: of past sequences, and of the texts of the perplexity.
      prompt_lengths, output_lengths: tokens in and out, in all pairs.
      workers, groups: of OD-MoE.
      shadow: its precision; tokens and KV cache are aligned at every step.
      departures: of the shadow.
      history: sequences shown beforehand to what learns from past ones.
      drop_threshold: AdapMoE's, of a token's weights. Below the default lie a quarter
        of what the default model chooses, as much as AdapMoE skips.
      fidelity_rows: real texts of `new_tokens` scored tokens each; 8,192 in all.
    """

    sources: Sequence[str] = ("prompts/alpaca.jsonl", "prompts/gsm8k.jsonl")
    rounds: int = 2
    prompt_tokens: int = 16
    new_tokens: Steps = 64
    prompt_lengths: Sequence[int] = (16, 128)
    output_lengths: Sequence[Steps] = (64, 256)
    workers: int = 4
    groups: int = 2
    shadow: Precision = "nf4"
    departures: Sequence[Departure] = ("late", "speculative")
    history: int = 8
    drop_threshold: Annotated[float, by(DropAbsent)] = 0.109
    fidelity_rows: int = 128

    def __post_init__(self):
        super().__post_init__()
        if self.workers % self.groups:
            raise ConfigError(
                f"groups is {self.groups} and workers {self.workers}, expected groups "
                "of equal size"
            )

    @property
    def at(self) -> list[tuple[int, int]]:
        """Tokens in and out of every setting."""
        pairs = ((n, m) for n in self.prompt_lengths for m in self.output_lengths)
        return list(pairs)


def pools_of(settings: Table2Settings, tokenizer: Tokenizer) -> dict[int, PromptPool]:
    """By length, the prompts of the past and those that rounds choose from."""
    count = settings.history + SPARE * settings.rounds
    return {
        length: make_pool(settings, tokenizer, count, length)
        for length in settings.prompt_lengths
    }


def check(settings: Table2Settings) -> None:
    """As `check_inputs`; also refuses files that do not hold enough prompts."""
    check_inputs(settings)
    tokenizer = tokenizer_of(settings)
    pools_of(settings, tokenizer)
    forced_pool(settings, tokenizer, settings.fidelity_rows)


def name_of(departure: str) -> str:
    """Of OD-MoE with a departure."""
    return f"OD-MoE, {departure}"


SPEEDS = {"ttft_ms": "ms", "decode": "tokens/s", "output": "tokens/s"}
FRAMES = {
    "speeds": frame("system tokens_in tokens_out", **SPEEDS, over_resident="1"),
    "over": frame("base system", **dict.fromkeys(SPEEDS, "1")),
    "bytes": frame("system", "main:bytes shadow:bytes workers:bytes in_all:bytes"),
    "fidelity": frame("system", "perplexity dropped ratio agreement"),
}
STUDY = Study(
    "od_moe_table2",
    Table2Settings,
    later("papers.od_moe.studies.table2_runs.measure"),
    FRAMES,
    later("papers.od_moe.studies.table2_rows.derive"),
    check=check,
    start={"rounds": 1, "fidelity_rows": 26},  # 8,320 tokens in five starts
)

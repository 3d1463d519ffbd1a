"""The studies of MoE-Prism: questions, settings, and the paper's claims.

What measures is imported when a study runs, so a wrong setting is refused at once.
"""

import dataclasses
from collections.abc import Sequence

from moe_edge.bench.prompts import LinkSettings, PromptSettings
from moe_edge.bench.registry import later
from moe_edge.bench.settings import StudySettings
from moe_edge.bench.study import Claim, Study
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import ConfigError
from moe_edge.evaluate.texts import find_file, read_text
from moe_edge.papers.moe_prism.studies import making
from moe_edge.papers.moe_prism.studies.models import (
    CG,
    LG,
    LG_FT,
    ORIGINAL,
    ModelSettings,
)
from moe_edge.profile.reader import open_profile
from moe_edge.profile.run_profile import run_profile

EVERY_K = tuple(range(1, 33))  # up to the default model's 8 experts of 4 sub-experts
PROMPTS = ("prompts/gsm8k.jsonl", "mcq/boolq.jsonl")
SETS = ("winogrande", "arc_challenge", "sciq", "boolq")
RATIO = "75th percentile / median of the magnitude"
PAPER_RATIO = 0.0391 / 0.0167  # fig. 3
PAPER_CHANGE = -0.10  # fig. 8: about, at 16 GB and 24 GB
PAPER_POINTS = 4  # fig. 10: times the operating points


@dataclasses.dataclass(frozen=True, kw_only=True)
class QualitySettings(ModelSettings):
    """The settings of a study that measures perplexity over K.

    Attributes:
      texts: files whose perplexity is measured, wikitext-2 with its tokenisation
        undone; `max_tokens` of each are read.
      k_values: sub-experts a token; the parent runs at those that U divides.
    """

    texts: Sequence[str] = ("text/wikitext-2/test.txt",)
    max_tokens: int = 4096
    k_values: Sequence[int] = EVERY_K


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table2Settings(QualitySettings):
    """What is compared, and where; `QualitySettings` names the rest.

    Attributes:
      curve_k_values: K of the picture, on the first `curve_tokens` of every text.
    """

    max_tokens: int = 16_384
    k_values: Sequence[int] = (4, 8, 12, 16, 20, 24, 28, 32)
    curve_k_values: Sequence[int] = EVERY_K
    curve_tokens: int = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table3Settings(ModelSettings):
    """What is compared, and by which questions.

    Attributes:
      k: sub-experts a token, a multiple of U.
      sets: multiple-choice files; `limit` questions of each, of at most
        `question_tokens` tokens with a choice.
    """

    k: int = 12
    sets: Sequence[str] = tuple(f"mcq/{name}.jsonl" for name in SETS)
    limit: int = 100
    question_tokens: int = 256


def check_sets(settings: Table3Settings) -> None:
    """Refuses models and sets that cannot be used."""
    making.check_inputs(settings)
    for name in settings.sets:
        read_text(find_file(name, settings.data_dir))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fig3Settings(StudySettings):
    """The profile that is measured: made of texts, or a folder.

    Attributes:
      checkpoint: path or `default`.
      profile: folder of one made before; None: make one.
      text, window, tokens, max_tokens_per_expert, batch_size, seed: of the one to
        make, see `run_profile`.
      data_dir: where relative paths are looked up too.
    """

    checkpoint: str = "default"
    profile: str | None = None
    text: str = ""
    window: int | None = None
    tokens: int | None = 131_072
    max_tokens_per_expert: int = 2048
    batch_size: int = 4
    seed: int = 0
    data_dir: str | None = None

    def make_profile(self, out_dir: str, dry_run: bool = False) -> None:
        """Makes the profile; see `run_profile`."""
        given = vars(self) | {"out_dir": out_dir, "dry_run": dry_run}
        del given["profile"]
        run_profile(**given)


def check_profile(settings: Fig3Settings) -> None:
    """Refuses texts, a profile or a checkpoint that cannot be used."""
    if settings.profile is None:
        settings.make_profile("unused", dry_run=True)
    else:
        sha256 = open_checkpoint(settings.checkpoint).content_sha256()
        open_profile(settings.profile).check(sha256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fig8Settings(QualitySettings, LinkSettings):
    """What is timed; `QualitySettings` and `LinkSettings` name the rest.

    Attributes:
      k_values: service levels, in sub-experts a token.
      budgets: device memory of each case.
    """

    sources: Sequence[str] = PROMPTS
    prompt_tokens: int = 48
    k_values: Sequence[int] = (13, 16, 17, 21, 25)
    budgets: Sequence[str] = ("25%", "50%")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fig10Settings(QualitySettings, PromptSettings):
    """What is timed; `QualitySettings` and `PromptSettings` name the rest.

    Attributes:
      batches: sequences that decode together.
    """

    sources: Sequence[str] = PROMPTS
    rounds: int = 15
    prompt_tokens: int = 48
    new_tokens: int = 64
    batches: Sequence[int] = (1, 2, 4, 8, 16)

    def __post_init__(self):
        super().__post_init__()
        for name, least in (("rounds", 2), ("new_tokens", 3)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, expected {least} or more: fewer "
                    "say nothing of how exact the times are"
                )


TABLE2 = Study(
    name="moe_prism_table2",
    question="Do sub-experts lose less perplexity than whole experts at equal compute "
    "(MoE-Prism, table 2 and fig. 9)?",
    settings=Table2Settings,
    measure=later("papers.moe_prism.studies.table2.run"),
    check=making.check_inputs,
    claim=Claim(
        source="MoE-Prism, table 2, OLMoE: perplexity over the original's by K",
        paper={
            CG: {12: 0.947, 16: 0.987, 20: 1.000, 24: 1.003},
            LG: {12: 0.999, 16: 1.000, 20: 0.999, 24: 1.000},
            LG_FT: {12: 0.934, 16: 0.976, 20: 0.995, 24: 1.004},
        },
        why="The paper's models have 1,024 to 6,144 neurons an expert, of which a "
        "token uses few; the default model has 64, which are much less specialised, "
        "and four gate neurons would be a quarter of a sub-expert: they are counted as "
        "active here, as fractions of the original's neurons. Half of its experts "
        "cost it little: with all of them its perplexity is .957 of that at K = 12, so "
        "no choice of them reaches the paper's .934. Fine-tuning ran at the best of a "
        "few rates. CG is our proxy gate: one gate neuron a sub-expert, chosen by a "
        "fit. The paper's own, the four most central neurons of the same partition, "
        "gave 1.004 at K = 12 in a trial that is not part of this entry.",
    ),
)
TABLE3 = Study(
    name="moe_prism_table3",
    question="Do sub-experts keep accuracy at three eighths of the compute (MoE-Prism, "
    "table 3)?",
    settings=Table3Settings,
    measure=later("papers.moe_prism.studies.table3.run"),
    check=check_sets,
    claim=Claim(
        source="MoE-Prism, table 3, OLMoE at K' = 3 and its refactored model at K = 12 "
        "(percent)",
        paper={
            ORIGINAL: dict(zip(SETS, (63.06, 46.08, 87.60, 64.46), strict=True)),
            LG_FT: dict(zip(SETS, (64.33, 46.33, 89.70, 67.65), strict=True)),
        },
        why="A model as small as the default one answers these questions hardly better "
        "than chance, and the sets are samples: where intervals overlap accuracy "
        "cannot tell models apart, and table 2's perplexity is the measure. The paper "
        "prompts with 0 to 5 examples, we with none.",
    ),
)
FIG3 = Study(
    name="moe_prism_fig3",
    question="How much of an expert's work do few of its neurons carry (MoE-Prism "
    "fig. 3)?",
    settings=Fig3Settings,
    measure=later("papers.moe_prism.studies.fig3.run"),
    check=check_profile,
    claim=Claim(
        source="MoE-Prism, section 2.2 and fig. 3",
        paper={
            "median magnitude": 0.0167,
            "75th percentile of the magnitude": 0.0391,
            RATIO: PAPER_RATIO,
        },
        why="The paper's numbers are of one expert of DeepSeek-V2-Lite (1408 neurons), "
        "whose weights set the scale: only the ratio of its percentiles compares "
        "models.",
    ),
)
FIG8 = Study(
    name="moe_prism_fig8",
    question="Do sub-experts shorten offloaded decoding at a service level between "
    "whole experts (MoE-Prism, fig. 8)?",
    settings=Fig8Settings,
    measure=later("papers.moe_prism.studies.fig8.run"),
    check=making.check_inputs,
    inline=True,
    claim=Claim(
        source="MoE-Prism, section 6.2.3 and fig. 8: change of latency per step",
        paper={"16 GB": PAPER_CHANGE, "24 GB": PAPER_CHANGE},
        why="The paper compares 4.25 with 5 experts on PCIe, where bytes are all that "
        "counts, and gains from better packing as well (hit ratio .4375 to .4453 at "
        "16 GB). Ours pays a latency for every transfer, and a sub-expert travels four "
        "times as often as a whole expert; a percentage budget leaves no fragment to "
        "pack.",
    ),
)
FIG10 = Study(
    name="moe_prism_fig10",
    question="How finely does K trade speed for quality (MoE-Prism, figs. 10 and 11)?",
    settings=Fig10Settings,
    measure=later("papers.moe_prism.studies.fig10.run"),
    check=making.check_inputs,
    claim=Claim(
        source="MoE-Prism, section 6.3.2 and abstract: more than 4 times the operating "
        "points",
        paper={"operating points, ratio": PAPER_POINTS},
        why="The paper shows GPUs and whole vLLM batches; here a step of a tiny model "
        "on CPU cores, of which experts are a part only: time falls with K, but not in "
        "proportion. Small blocks cost the loop over blocks more than large ones.",
    ),
)
STUDIES = {study.name: study for study in (TABLE2, TABLE3, FIG3, FIG8, FIG10)}

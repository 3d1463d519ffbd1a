"""The studies of MoE-Prism: questions, settings, and the paper's claims.

What measures is imported when a study runs, so a wrong setting is refused at once.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from moe_edge.bench.prompts import AnyLinkSettings, PromptSettings
from moe_edge.bench.registry import later
from moe_edge.bench.settings import Budget, Seed, Steps, StudySettings
from moe_edge.bench.study import Study
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import ConfigError
from moe_edge.evaluate.texts import find_file, read_text
from moe_edge.metrics.frames import Frame, frame
from moe_edge.papers.moe_prism.studies import making
from moe_edge.papers.moe_prism.studies.models import ModelSettings
from moe_edge.profile.reader import open_profile
from moe_edge.profile.run_profile import run_profile

EVERY_K = tuple(range(1, 33))  # up to the default model's 8 experts of 4 sub-experts
PROMPTS = ("prompts/gsm8k.jsonl", "mcq/boolq.jsonl")
SETS = ("winogrande", "arc_challenge", "sciq", "boolq")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QualitySettings(ModelSettings):
    """The settings of a study that measures perplexity over K.

    Attributes:
      texts: files whose perplexity is measured, wikitext-2 with its tokenisation
        undone; `max_tokens` of each are read.
      k_values: sub-experts a token; the parent runs at those that U divides.
    """

    texts: Sequence[str] = ("text/wikitext-2/test.txt",)
    max_tokens: int = 16_384
    k_values: Sequence[int] = EVERY_K


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table2Settings(QualitySettings):
    """What is compared, and where; `QualitySettings` names the rest.

    Attributes:
      curve_k_values: K of the picture, on the first `curve_tokens` of every text.
    """

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
    seed: Seed = 0
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
class Fig8Settings(QualitySettings, AnyLinkSettings, PromptSettings):
    """What is timed; its parts name the rest.

    Attributes:
      k_values: service levels, in sub-experts a token.
      budgets: device memory of each case.
    """

    sources: Sequence[str] = PROMPTS
    prompt_tokens: int = 48
    k_values: Sequence[int] = (13, 16, 17, 21, 25)
    budgets: Sequence[Budget] = ("25%", "50%")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fig10Settings(QualitySettings, PromptSettings):
    """What is timed; `QualitySettings` and `PromptSettings` name the rest.

    Attributes:
      batches: sequences that decode together.
    """

    sources: Sequence[str] = PROMPTS
    rounds: int = 15
    prompt_tokens: int = 48
    new_tokens: Steps = 64
    batches: Sequence[int] = (1, 2, 4, 8, 16)

    def __post_init__(self):
        super().__post_init__()
        for name, least in (("rounds", 2), ("new_tokens", 3)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, expected {least} or more: fewer "
                    "say nothing of how exact the times are"
                )


def _study(name: str, settings: type, frames: Mapping[str, Frame], **more) -> Study:
    """A study that is measured in a module of its name, which loads JAX."""
    measure, derive = (
        later(f"papers.moe_prism.studies.{name}.{step}")
        for step in ("measure", "derive")
    )
    given = f"moe_prism_{name}", settings, measure, frames, derive
    return Study(*given, **{"check": making.check_inputs} | more)


_POINTS = frame("model k", "perplexity neurons ratio")
TABLE2 = _study("table2", Table2Settings, {"points": _POINTS, "curve": _POINTS})
TABLE3 = _study(
    "table3",
    Table3Settings,
    {"answers": frame("model set", "accuracy"), "sets": frame("set", "overlaps")},
    check=check_sets,
)
FIG3 = _study(
    "fig3",
    Fig3Settings,
    {
        "experts": frame("of", "own fixed shuffled down needed median_over_mean ratio"),
        "quantiles": frame("of quantile", "magnitude"),
        "below": frame("layer magnitude", "share"),
        "lorenz": frame("order first", "share"),
    },
    check=check_profile,
)
FIG8 = _study(
    "fig8",
    Fig8Settings,
    {
        "levels": frame("model experts budget", "tpot_ms hit_ratio missed_mb"),
        "quality": frame("model experts", "perplexity"),
        "changes": frame("budget kind", "change"),
    },
    inline=True,
)
FIG10 = _study(
    "fig10",
    Fig10Settings,
    {
        "times": frame("model k batch", "tpot_ms rate:tokens/s"),
        "quality": frame("model k", "perplexity"),
        "errors": frame("batch", "error"),
    },
    start={"rounds": 5},
)
STUDIES = {study.name: study for study in (TABLE2, TABLE3, FIG3, FIG8, FIG10)}

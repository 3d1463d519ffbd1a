"""The fidelity card as a study: what is compared, on which text."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from moe_edge.bench.offloading import studied
from moe_edge.bench.quickstart.texts import BOOKS
from moe_edge.bench.registry import later
from moe_edge.bench.settings import Budget, Margin, Seed, StudySettings, by, known
from moe_edge.bench.study import Study
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import ConfigError
from moe_edge.engine.load import check_checkpoint
from moe_edge.engine.offload_options import OffloadOptions, resolve_offload
from moe_edge.evaluate.texts import find_file, read_text
from moe_edge.model.quantised import KINDS, format_of
from moe_edge.offload.assist_base import ASSISTS
from moe_edge.route.drop import DropAbsent
from moe_edge.route.prefer import Prefer


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForcedText(StudySettings):
    """A model, and pieces of a text on which its routes are compared.

    Attributes:
      checkpoint: folder (Hugging Face's or ours), GGUF file, or `default`, the model in
        the package.
      text: UTF-8 file; None: the packaged held-out book.
      rows: pieces of the text; each has `prompt_tokens` that are prefilled and
        `forced_tokens` that are decoded and scored.
      data_dir: where a relative text is looked up too.
      seed: of the bootstrap.
      offload: policies but for the route (default: score-based eviction, serial, no
        prefetching).
    """

    checkpoint: str = "default"
    text: str | None = None
    rows: int = 6
    prompt_tokens: int = 64
    forced_tokens: int = 192
    data_dir: str | None = None
    seed: Seed = 0
    offload: OffloadOptions | None = None

    @property
    def base(self) -> OffloadOptions:
        """The options that the lossy ones are added to."""
        # Serial transfers and no prefetching: what is resident is then the same in
        # every run.
        return self.offload or studied(eviction="smoe_score", asynchronous=False)

    @property
    def path(self) -> Path:
        """Of the text."""
        return BOOKS if self.text is None else Path(find_file(self.text, self.data_dir))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FidelitySettings(ForcedText):
    """What is measured; `ForcedText` names the rest. A lossy route of `offload` too.

    Attributes:
      device_memory: budgets, separated by commas, each a share of the experts' bytes
        (`25%`) or a size that also holds the dense weights, the KV cache and staging.
      batch_sizes: rows decoded together.
      a_values: of substitution.
      thresholds: of dropping.
      bonuses: of preferring what is resident.
      deferred: assists (`two_pointer`, `fiddler`, `all`) by which the host computes
        absent experts whose outputs the next layer adds. Of mode fused.
      in_turn: of mode fused: options take turns, a batch of rows each, so that their
        times compare; every option's engine is then there at once, with its slots.
      reference: another checkpoint that this one is measured against, both resident,
        and no lossy option (default: what a quantised one was made from; else none).
      activations: of this checkpoint, as of `moe-edge generate`; int8 is measured
        against `reference`, which is exact and may be the same checkpoint.
      kv_cache: of this checkpoint, likewise: bfloat16 or q8_0.
      layerwise: all tokens pass a layer together (`evaluate/layerwise.py`), many times
        as fast. For one row at a time and budgets that are shares; prompts are scored,
        too, and nothing is prefetched.
    """

    device_memory: str = "15%,25%,50%"
    batch_sizes: Sequence[int] = (1, 3)
    a_values: Sequence[Margin] = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6)
    thresholds: Sequence[Annotated[float, by(DropAbsent)]] = (0.05, 0.1, 0.15, 0.25)
    bonuses: Sequence[Annotated[float, by(Prefer)]] = (0.2, 0.5, 0.8)
    deferred: tuple[Annotated[str, known("assist", ASSISTS)], ...] = ()
    in_turn: bool = False
    reference: str | None = None
    activations: str = "float32"
    kv_cache: str = "float32"
    layerwise: bool = False

    def __post_init__(self):
        super().__post_init__()
        offloads = self.offloads  # refuses its values
        if self.layerwise:
            _check_layerwise(self, offloads)
        _check_mode(self)

    @property
    def of_fused(self) -> list[str]:
        """What is asked for that mode fused alone has."""
        given = {"deferred": self.deferred, "in_turn": self.in_turn}
        return [f"{name} is {value}" for name, value in given.items() if value]

    @property
    def offloads(self) -> dict[str, OffloadOptions]:
        """`base` under every budget."""
        budgets = [part.strip() for part in self.device_memory.split(",")]
        return {budget: resolve_offload(budget, self.base) for budget in budgets}

    @property
    def rounded(self) -> dict[str, str]:
        """Of a run's own types those that are not exact."""
        given = {"activations": self.activations, "kv_cache": self.kv_cache}
        return {name: kind for name, kind in given.items() if kind != "float32"}


def _check_layerwise(
    settings: FidelitySettings, offloads: dict[str, OffloadOptions]
) -> None:
    """Refuses what no walk through one layer after the other can stand for."""
    wrong = {f"device memory {budget}": not budget.endswith("%") for budget in offloads}
    base = settings.base
    wrong |= {
        f"batch sizes {tuple(settings.batch_sizes)}": set(settings.batch_sizes) != {1},
        f"predictor {base.predictor}": base.predictor != "none",
        f"assist {base.assist}": base.assist is not None,
        f"reference {settings.reference}": settings.reference is not None,
        f"mode {base.mode}": base.mode == "fused",
    }
    for given in (name for name, is_wrong in wrong.items() if is_wrong):
        raise ConfigError(
            f"layerwise does not go with {given}; it expects batch size 1, shares of "
            "the experts' bytes, and neither predictor, assist, reference nor mode "
            "fused: leave layerwise out"
        )


def _check_mode(settings: FidelitySettings) -> None:
    """Refuses what only mode fused has, and rules that cannot be asked there."""
    for given in settings.of_fused:
        if settings.base.mode != "fused":
            raise ConfigError(
                f"{given}, which is of mode fused, and the mode "
                f"{settings.base.mode}; use offload.mode = 'fused', or leave it out"
            )
    for name in settings.deferred:  # refuses rules that count more than experts
        asked = {"assist": name, "assist_options": {}, "assist_in_fused": True}
        dataclasses.replace(settings.base, **asked)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantisedSettings(ForcedText):
    """Several ways to quantise the experts of one checkpoint, each measured against it.

    Attributes:
      kinds: of `moe-edge convert --expert_dtype`, each once.
      device_memory: of the offloaded engine that must give the resident one's bits, a
        share of the experts' bytes or a size, as everywhere.
      batch_sizes: rows decoded together.
    """

    kinds: Sequence[Annotated[str, known("kinds", KINDS)]] = ("q8_0", "q4_0")
    device_memory: Budget = "25%"
    batch_sizes: Sequence[int] = (1, 3)

    def __post_init__(self):
        super().__post_init__()
        if len(set(self.kinds)) < len(self.kinds):
            raise ConfigError(f"kinds are {self.kinds}, expected each once")
        if not self.budget.lossless:
            raise ConfigError(
                f"route {self.base.route} is lossy, expected a lossless one: the "
                "offloaded engine must give the resident one's bits"
            )

    @property
    def budget(self) -> OffloadOptions:
        """`base` under `device_memory`."""
        return resolve_offload(self.device_memory, self.base)


def reference_of(settings: FidelitySettings) -> str | None:
    """The checkpoint to measure against; None: the same one, options apart.

    Raises:
      ConfigError: a quantised checkpoint whose source is not there.
    """
    if settings.reference is not None:
        return settings.reference
    reader = open_checkpoint(settings.checkpoint)
    kind = format_of(reader.layout.kind or reader.dense_kind)
    if kind is None:
        return None
    source = reader.hf_source if reader.config.moe.sub_experts == 1 else None
    if source is None or not Path(source).is_dir():
        raise ConfigError(
            f"{settings.checkpoint} has {kind} weights, and what it was "
            f"made from is not there ({source}); name it with --reference"
        )
    return source


def check(settings: FidelitySettings) -> None:
    """Refuses a text, a checkpoint or budgets that cannot be used."""
    read_text(settings.path)
    reference = reference_of(settings)
    if reference is not None:
        check_checkpoint(reference)
        _check_no_options(settings, reference)
    given = room_of(settings) | settings.rounded
    if reference is None and settings.rounded:
        asked = " and ".join(" ".join(each) for each in settings.rounded.items())
        raise ConfigError(
            f"{asked}: measured against another run; name one with --reference, which "
            f"may be {settings.checkpoint} itself"
        )
    for options in settings.offloads.values():
        check_checkpoint(settings.checkpoint, offload=options, **given)


def _check_no_options(settings: FidelitySettings, reference: str) -> None:
    for given in settings.of_fused:
        raise ConfigError(
            f"{given}, and {settings.checkpoint} is measured against "
            f"{reference}, without lossy options of an engine; leave it out"
        )


def room_of(settings: FidelitySettings | QuantisedSettings) -> dict[str, int]:
    """Rows and tokens whose KV cache an absolute budget must hold."""
    longest = settings.prompt_tokens + settings.forced_tokens
    return {"batch": max(settings.batch_sizes), "capacity": longest}


FIDELITY = Study(
    name="fidelity_default",
    question="How much do the lossy options change what a model says?",
    settings=FidelitySettings,
    measure=later("bench.fidelity.card.run"),
    check=check,
)
QUANTISED = Study(
    name="fidelity_quantised",
    question="How much does quantising the experts change what a model says?",
    settings=QuantisedSettings,
    measure=later("bench.fidelity.quantised.run_kinds"),
    check=later("bench.fidelity.quantised.check_kinds"),
)
STUDIES = {study.name: study for study in (FIDELITY, QUANTISED)}

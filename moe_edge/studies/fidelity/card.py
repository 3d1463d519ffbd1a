"""What lossy options change, per model and measured: a fidelity card.

Every option is compared with the unmodified resident model on the same forced tokens
of the same batches, next to two controls: the lossless offloaded engine, which must
agree in every bit, and half the experts, which puts the numbers in scale.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from moe_edge.engine.load import Loaded, check_checkpoint, load_engine
from moe_edge.engine.offload_options import OffloadOptions, resolve_offload
from moe_edge.evaluate.agreement import compare
from moe_edge.evaluate.fidelity import (
    Option,
    SwitchEngine,
    card,
    cut_rows,
    option_grid,
)
from moe_edge.evaluate.stepwise import score_batches
from moe_edge.evaluate.texts import find_file, read_text, sha256_of
from moe_edge.evaluate.weight_rules import RuleTally, rule_of
from moe_edge.metrics.results import metric
from moe_edge.route.policy import get_route
from moe_edge.studies.engines import describe_model
from moe_edge.studies.fidelity.plots import fidelity_curves
from moe_edge.studies.quickstart.texts import BOOKS
from moe_edge.studies.settings import RULES, Rules, StudySettings
from moe_edge.studies.study import Findings, Study

# Serial transfers and no prefetching: what is resident is then the same in every run.
BASE = OffloadOptions(eviction="smoe_score", asynchronous=False)
LIMITS = (
    "Teacher-forced: each prediction is made on the text itself, so differences do not "
    "grow along a text as they would in free generation.",
    "Every row's prompt is prefilled, which is lossless in every mode.",
    "One model and one text: tolerance to substitution differs between models, so no "
    "value of a is safe for another.",
    "Agreement's interval takes tokens as independent (Wilson); that of the perplexity "
    "ratio resamples blocks of 32 tokens (bootstrap of paired differences).",
    "Rule `replaced` keeps the sum of a token's weights, so renormalising changes "
    "nothing there.",
)
Cards = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FidelitySettings(StudySettings):
    """What is measured, and on which text.

    Attributes:
      checkpoint: path or `default`.
      text: file to measure on; default: the packaged held-out book.
      device_memory: budgets, separated by commas.
      offload: policies but for the route (default: score-based eviction, serial, no
        prefetching); a lossy route of it is measured too.
      batch_sizes: rows decoded together.
      a_values: of substitution.
      thresholds: of dropping.
      rows: pieces of the text; each has `prompt_tokens` that are prefilled and
        `forced_tokens` that are decoded and scored.
      data_dir: where a relative text is looked up too.
      seed: of the bootstrap.
    """

    # Several budgets: `offloads` checks each.
    rules: ClassVar[Rules] = RULES | {"device_memory": lambda name, value: None}

    checkpoint: str = "default"
    text: str | None = None
    device_memory: str = "15%,25%,50%"
    offload: OffloadOptions | None = None
    batch_sizes: Sequence[int] = (1, 3)
    a_values: Sequence[float] = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6)
    thresholds: Sequence[float] = (0.05, 0.1, 0.15, 0.25)
    rows: int = 6
    prompt_tokens: int = 64
    forced_tokens: int = 192
    data_dir: str | None = None
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        _ = self.grid, self.offloads  # refuse their values

    @property
    def base(self) -> OffloadOptions:
        """The options that the lossy ones are added to."""
        return self.offload or BASE

    @property
    def budgets(self) -> list[str]:
        return [part.strip() for part in self.device_memory.split(",")]

    @property
    def offloads(self) -> list[OffloadOptions]:
        """`base` under every budget."""
        return [resolve_offload(budget, self.base) for budget in self.budgets]

    @property
    def grid(self) -> list[Option]:
        """The lossy options that are measured."""
        grid = option_grid(self.a_values, self.thresholds)
        if not self.base.lossless:
            own = Option.of(get_route(self.base.route, **self.base.route_options))
            grid += [own] if own not in grid else []
        return grid

    @property
    def path(self) -> Path:
        """Of the text."""
        return find_text(self.text, self.data_dir)


def find_text(text: str | None, data_dir: str | None) -> Path:
    """The text to measure on: by default the packaged held-out book."""
    return BOOKS if text is None else Path(find_file(text, data_dir))


def check(settings: FidelitySettings) -> None:
    """Refuses a text, a checkpoint or budgets that cannot be used."""
    read_text(settings.path)
    for options in settings.offloads:
        check_checkpoint(settings.checkpoint, offload=options)


def run(settings: FidelitySettings) -> Findings:
    """Measures every lossy option of a model."""
    loaded = load_engine(settings.checkpoint)
    forced = cut_rows(
        loaded.tokenizer.encode(read_text(settings.path)),
        rows=settings.rows,
        prompt_tokens=settings.prompt_tokens,
        forced_tokens=settings.forced_tokens,
    )
    resident, top_k = loaded.engine, loaded.engine.config.moe.top_k
    half = resident.at_k(max(1, top_k // 2))
    references, cards, tally = {}, [], RuleTally()
    for batch in settings.batch_sizes:
        references[batch] = score_batches(resident, forced, batch)
        run = score_batches(half, forced, batch)
        name = f"{half.config.moe.top_k} of {top_k} experts"
        found = vars(compare(run, references[batch], settings.seed))
        cards.append({"option": name, "control": True, "batch": batch, **found})
    size = settings.prompt_tokens + settings.forced_tokens
    for options in settings.offloads:
        switch = SwitchEngine(
            settings.checkpoint,
            options,
            batch=max(settings.batch_sizes),
            capacity=size,
        )
        for batch in settings.batch_sizes:
            for option in [Option("topk", {}), *settings.grid]:
                run = switch.run(option.get(), forced, batch)
                found = card(option, switch, run, references[batch])
                found |= {"batch": batch, "device_memory": options.device_memory}
                found["control"] = option.route == "topk"
                cards.append(found)
                _print_card(found)
                if option.route == "substitute":
                    tally.add(found, run, references[batch])
        switch.close()
    return findings(cards, tally.verdict(settings.seed), loaded, settings)


def _print_card(found: Mapping[str, Any]) -> None:
    print(
        f"{found['device_memory']:>6} batch {found['batch']}  {name_of(found):<36} "
        f"agreement {found['agreement']:.3f}, "
        f"perplexity x{found['perplexity_ratio']:.4f}, "
        f"changed {100 * found['changed_ratio']:.1f} %, "
        f"hit ratio {found['hit_ratio']:.3f}",
        flush=True,
    )


def name_of(found: Mapping[str, Any]) -> str:
    """The option of a card in words."""
    if found["option"] == "substitute":
        return f"substitute a={found['a']:g}, {rule_of(found)}"
    if found["option"] == "drop":
        rule = "renormalised" if found["renormalise"] else "as they are"
        return f"drop below {found['threshold']:g}, {rule}"
    return "lossless offloading" if found["option"] == "topk" else found["option"]


def findings(
    cards: Cards, verdict, loaded: Loaded, settings: FidelitySettings
) -> Findings:
    """The entry of all cards; `verdict` is about the weight rules, None without any."""
    source = f"{settings.path.parent.name}/{settings.path.name}"
    middle = settings.budgets[len(settings.budgets) // 2]
    shown = [
        found
        for found in cards
        if found["control"]
        or found["device_memory"] == middle
        and (found["option"] != "substitute" or rule_of(found) == verdict["best"])
    ]
    half = cards[0]
    first = [c for c in shown if c["batch"] == half["batch"]]
    curve = [c for c in first if c["option"] == "substitute" and not c["control"]]
    ends = curve[:: max(1, len(curve) - 1)]
    details = [f"Measured on {source}, batch {half['batch']}."]
    if verdict is not None and len(verdict["rules"]) > 1:
        clear = "clearly" if verdict["clear"] else "within the noise"
        details.append(f"Weight rule that stays closest, {clear}: {verdict['best']}.")
    return Findings(
        answer=f"With {middle} of the experts' bytes: "
        + ("; ".join(f"a={c['a']:g} {_agrees(c)}" for c in ends) or "no substitution")
        + f"; in scale, {half['option']} {_agrees(half)}.",
        details=details,
        model=describe_model(settings.checkpoint, loaded.engine.weights, loaded.dtype),
        workload={
            "text": {"source": source, "sha256": sha256_of(settings.path)},
            "rows": settings.rows,
            "prompt_tokens": settings.prompt_tokens,
            "forced_tokens": settings.forced_tokens,
            "device_memory": settings.budgets,
            "batch_sizes": list(settings.batch_sizes),
            "eviction": settings.base.eviction,
            "predictor": settings.base.predictor,
        },
        metrics=[*_rule_rows(verdict), *(row for c in shown for row in _card_rows(c))],
        limits=LIMITS,
        seeds=[settings.seed],
        baselines=["resident model", "lossless offloading", "half the experts"],
        checks=_control_checks(cards, settings.base),
        plot=lambda path: fidelity_curves(
            path, cards, title=f"{settings.checkpoint}: fidelity"
        ),
        files={"cards.json": json.dumps(cards, indent=1) + "\n"},
        summary={"cards": cards, "weight_rule": verdict},
    )


def _agrees(found: Mapping[str, Any]) -> str:
    return (
        f"agrees on {100 * found['agreement']:.1f} % of tokens, perplexity "
        f"x{found['perplexity_ratio']:.3f}"
    )


def _rule_rows(verdict: Mapping[str, Any] | None) -> list[dict]:
    """How the weight rules compare over all settings."""
    rows = []
    for rule, means in (verdict["rules"] if verdict else {}).items():
        what, n = f"weight rule {rule}, all settings", means["settings"]
        rows += [
            metric(what, "mean size of change", means["moved_nats"], "nats", n),
            metric(what, "mean agreement", means["agreement"], "1", n),
            metric(what, "mean perplexity ratio", means["perplexity_ratio"], "1", n),
        ]
    return rows


def _card_rows(found: Mapping[str, Any]) -> list[dict]:
    """Agreement and perplexity ratio of a card; all cards are in cards.json."""
    where = f"{found['device_memory']}, " if "device_memory" in found else ""
    what = f"{where}batch {found['batch']}: {name_of(found)}"
    rows = []
    for label, key, interval in (
        ("agreement", "agreement", "agreement_interval95"),
        ("perplexity ratio", "perplexity_ratio", "ratio_interval95"),
    ):
        low, high = found[interval]
        spread = ("half of the 95 % interval", (high - low) / 2)
        rows.append(metric(what, label, found[key], "1", found["tokens"], spread))
    return rows


def _control_checks(cards: Cards, base: OffloadOptions) -> dict[str, bool]:
    """The lossless control; what the host computes is summed in another order."""
    error = 0.0 if base.assist is None else 1e-4
    within = "exactly 1" if error == 0 else f"1 within {error:g}"
    return {
        f"lossless offloading agrees on every token, perplexity ratio {within}": all(
            card["agreement"] == 1 and abs(card["perplexity_ratio"] - 1) <= error
            for card in cards
            if card["option"] == "topk"
        )
    }


STUDY = Study(
    name="fidelity_default",
    question="How much do the lossy options change what a model says?",
    settings=FidelitySettings,
    measure=run,
    check=check,
)

"""MoE-Prism, table 3: multiple-choice accuracy at three eighths of the compute."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_edge.bench.study import Findings
from moe_edge.core.checks import ConfigError
from moe_edge.evaluate.multiple_choice import (
    accuracy_of,
    answer_questions,
    short_questions,
)
from moe_edge.evaluate.texts import find_file, sha256_of
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.metrics.results import interval_metric, metric
from moe_edge.papers.moe_prism.studies import making, models
from moe_edge.papers.moe_prism.studies.models import ORIGINAL
from moe_edge.papers.moe_prism.studies.quality import Compared
from moe_edge.papers.moe_prism.studies.studies import Table3Settings

FULL = "all experts"
BATCH = 8  # questions scored together
Accuracy = Mapping[str, Mapping[str, Mapping[str, Any]]]  # by model and set


def run(settings: Table3Settings) -> Findings:
    """Answers every set with every model at K, and with all experts.

    Raises:
      ConfigError: a K that the parent has no whole experts for.
    """
    settings = making.make_models(settings)
    compared = Compared.load(settings.checkpoints())
    if settings.k % compared.sub_experts:
        raise ConfigError(
            f"k is {settings.k}, expected a multiple of the {compared.sub_experts} "
            "sub-experts of an expert"
        )
    tokenizer = compared.parent.tokenizer
    files = {name: find_file(name, settings.data_dir) for name in settings.sets}
    tasks = {
        Path(file).stem: short_questions(
            tokenizer, file, settings.limit, settings.question_tokens
        )
        for file in files.values()
    }
    questions = [question for part in tasks.values() for question in part]

    def answer(engine) -> dict[str, dict[str, Any]]:
        lines = iter(answer_questions(engine, tokenizer, questions, BATCH)[1])
        return {
            task: accuracy_of(part, [next(lines) for _ in part])
            for task, part in tasks.items()
        }

    accuracy = {FULL: answer(compared.parent.engine)}
    accuracy |= {name: answer(e) for (name, _), e in compared.at([settings.k]).items()}
    workload = {
        "sets": [{"path": n, "sha256": sha256_of(file)} for n, file in files.items()],
        "questions": {task: len(part) for task, part in tasks.items()},
    }
    return findings(settings, accuracy, compared.model, workload)


def findings(settings: Table3Settings, accuracy: Accuracy, model, workload) -> Findings:
    """The entry from what was answered."""
    rows = [
        interval_metric(
            name, f"accuracy, {task}", one["accuracy"], one["interval95"], one["n"]
        )
        for name, found in accuracy.items()
        for task, one in found.items()
    ]
    chance = {task: one["chance"] for task, one in accuracy[FULL].items()}
    rows += [metric("chance", f"accuracy, {t}", p, "1") for t, p in chance.items()]
    at_k = {name: found for name, found in accuracy.items() if name != FULL}
    unclear = 0
    for task in chance:
        intervals = [found[task]["interval95"] for found in at_k.values()]
        lows, highs = zip(*intervals, strict=True)
        unclear += max(lows) <= min(highs)
    means = {
        name: sum(one["accuracy"] for one in found.values()) / len(found)
        for name, found in accuracy.items()
    }
    return models.findings(
        settings,
        answer=f"Not informative in {unclear} of {len(chance)} sets (95 % "
        "intervals overlap). Mean accuracy: "
        + ", ".join(f"{name} {value:.3f}" for name, value in means.items())
        + f"; chance {sum(chance.values()) / len(chance):.3f}.",
        model=model,
        workload=workload,
        metrics=rows,
        baselines=[FULL, ORIGINAL, "chance"],
        ours={
            name: {task: round(100 * one["accuracy"], 1) for task, one in found.items()}
            for name, found in at_k.items()
        },
        plot=lambda path: plot(path, accuracy, settings.k),
        summary={"accuracy": means},
    )


def plot(path: Path, accuracy: Accuracy, k: int) -> None:
    """A bar for each model, and for guessing, in every set."""
    series: dict[str, Sequence[float]] = {}
    spreads = {}
    for name, found in accuracy.items():
        series[name] = [one["accuracy"] for one in found.values()]
        intervals = [one["interval95"] for one in found.values()]
        spreads[name] = [(high - low) / 2 for low, high in intervals]
    series["chance"] = [one["chance"] for one in accuracy[FULL].values()]
    panel = Panel("", "accuracy", list(accuracy[FULL]), series, spreads)
    draw_panels(path, [panel], title=f"Accuracy at K = {k}, 95 % intervals")

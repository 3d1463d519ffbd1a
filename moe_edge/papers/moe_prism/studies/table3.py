"""MoE-Prism, table 3: multiple-choice accuracy at three eighths of the compute."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_edge.core.checks import ConfigError
from moe_edge.evaluate.multiple_choice import (
    accuracy_of,
    answer_questions,
    short_questions,
)
from moe_edge.evaluate.texts import find_file, sha256_of
from moe_edge.metrics.frames import Rows, Tables, interval
from moe_edge.papers.moe_prism.studies import making, models
from moe_edge.papers.moe_prism.studies.models import ORIGINAL
from moe_edge.papers.moe_prism.studies.quality import Compared
from moe_edge.papers.moe_prism.studies.studies import Table3Settings

FULL, CHANCE = "all experts", "chance"
BATCH = 8  # questions scored together
Accuracy = Mapping[str, Mapping[str, Mapping[str, Any]]]  # by model and set


def measure(settings: Table3Settings, rows: Rows) -> None:
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
    tell(rows, accuracy)
    models.tell(rows, settings, compared.model, workload)
    rows.about["baselines"] = [FULL, ORIGINAL, CHANCE]


def tell(rows: Rows, accuracy: Accuracy) -> None:
    """Adds what was answered, and whether the intervals of a set overlap."""
    for name, found in accuracy.items():
        for task, one in found.items():
            share = interval(one["accuracy"], one["interval95"], one["n"])
            rows("answers", name, task, accuracy=share)
    for task, one in accuracy[FULL].items():
        rows("answers", CHANCE, task, accuracy=one["chance"])
        bounds = [of[task]["interval95"] for n, of in accuracy.items() if n != FULL]
        lows, highs = zip(*bounds, strict=True)
        rows("sets", task, overlaps=max(lows) <= min(highs))


def derive(tables: Tables) -> dict[str, Any]:
    """Means over the sets, and in how many of these intervals overlap."""
    answers, sets = tables["answers"], tables["sets"]
    means = answers.groupby("model", sort=False).accuracy.mean().reset_index()
    return {
        "means": means[means.model != CHANCE],
        "chance": means.set_index("model").accuracy[CHANCE],
        "unclear": sets.overlaps.sum(),
        "num_sets": len(sets),
        "shown": answers,
    }

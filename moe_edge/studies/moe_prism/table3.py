"""MoE-Prism, table 3: multiple-choice accuracy at three eighths of the compute."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from moe_edge.core.checks import ConfigError
from moe_edge.evaluate.multiple_choice import (
    answer_questions,
    short_questions,
    wilson_interval,
)
from moe_edge.evaluate.texts import find_file, read_text, sha256_of
from moe_edge.metrics.plots_panels import Panel, bar_panels
from moe_edge.metrics.results import metric
from moe_edge.studies.moe_prism import models
from moe_edge.studies.moe_prism.models import ORIGINAL, ModelSettings
from moe_edge.studies.moe_prism.quality import Compared
from moe_edge.studies.study import Claim, Findings, Study

FULL = "all experts"
BATCH = 8  # questions scored together
SETS = ("winogrande", "arc_challenge", "sciq", "boolq")
CLAIM = Claim(
    source="MoE-Prism, table 3, OLMoE at K' = 3 and its refactored model at K = 12 "
    "(percent)",
    paper={
        "original": dict(zip(SETS, (63.06, 46.08, 87.60, 64.46), strict=True)),
        "LG-FT": dict(zip(SETS, (64.33, 46.33, 89.70, 67.65), strict=True)),
    },
    why="A model as small as the default one answers these questions hardly better "
    "than chance, and the sets are samples: where intervals overlap accuracy cannot "
    "tell models apart, and table 2's perplexity is the measure. The paper prompts "
    "with 0 to 5 examples, we with none.",
)


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


def check(settings: Table3Settings) -> None:
    """Refuses models and sets that cannot be used."""
    models.check_inputs(settings)
    for name in settings.sets:
        read_text(find_file(name, settings.data_dir))


def run(settings: Table3Settings) -> Findings:
    """Answers every set with every model at K, and with all experts.

    Raises:
      ConfigError: a K that the parent has no whole experts for.
    """
    settings = models.make_models(settings)
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

    def answer(engine) -> list[bool]:
        lines = answer_questions(engine, tokenizer, questions, BATCH)[1]
        return [line["chosen_index"] == line["answer_index"] for line in lines]

    right = {FULL: answer(compared.parent.engine)}
    right |= {name: answer(e) for (name, _), e in compared.at([settings.k]).items()}
    workload = models.workload_of(
        settings,
        sets=[{"path": n, "sha256": sha256_of(file)} for n, file in files.items()],
        questions={task: len(part) for task, part in tasks.items()},
    )
    return findings(right, tasks, compared.model, workload, settings.limits())


def findings(right, tasks, model, workload, limits) -> Findings:
    """The entry from what was answered: `right` has each model's answers in order."""
    accuracy: dict[str, dict[str, tuple]] = {name: {} for name in right}
    rows, chance, unclear = [], {}, []
    for name, answers in right.items():
        start = 0
        for task, questions in tasks.items():
            n = len(questions)
            count = sum(answers[start : start + n])
            start += n
            low, high = wilson_interval(count, n)
            accuracy[name][task] = count / n, low, high
            chance[task] = sum(1 / len(q.choices) for q in questions) / n
            spread = ("half of the 95 % interval", (high - low) / 2)
            rows.append(metric(name, f"accuracy, {task}", count / n, "1", n, spread))
    for task, level in chance.items():
        rows.append(metric("chance", f"accuracy, {task}", level, "1"))
        intervals = [accuracy[name][task][1:] for name in right if name != FULL]
        if max(low for low, _ in intervals) <= min(high for _, high in intervals):
            unclear.append(task)
    means = {
        name: sum(found[task][0] for task in tasks) / len(tasks)
        for name, found in accuracy.items()
    }

    def plot(path) -> None:
        series = {n: [found[t][0] for t in tasks] for n, found in accuracy.items()}
        spreads = {
            n: [(found[t][2] - found[t][1]) / 2 for t in tasks]
            for n, found in accuracy.items()
        }
        series["chance"] = list(chance.values())
        panel = Panel("", "accuracy", list(tasks), series, spreads)
        bar_panels(
            path, [panel], title=f"Accuracy at K = {workload['k']}, 95 % intervals"
        )

    return Findings(
        answer=f"Not informative in {len(unclear)} of {len(tasks)} sets (95 % "
        "intervals overlap). Mean accuracy: "
        + ", ".join(f"{name} {value:.3f}" for name, value in means.items())
        + f"; chance {sum(chance.values()) / len(chance):.3f}.",
        model=model,
        workload=workload,
        metrics=rows,
        baselines=[FULL, ORIGINAL, "chance"],
        limits=limits,
        ours={
            name: {task: round(100 * value[0], 1) for task, value in found.items()}
            for name, found in accuracy.items()
            if name != FULL
        },
        plot=plot,
        summary={"accuracy": means},
    )


STUDY = Study(
    name="moe_prism_table3",
    question="Do sub-experts keep accuracy at three eighths of the compute (MoE-Prism, "
    "table 3)?",
    settings=Table3Settings,
    measure=run,
    check=check,
    claim=CLAIM,
)

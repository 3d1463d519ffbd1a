"""SMoE, table IV: multiple-choice accuracy over a, with fidelity on a text.

Prompts are prefilled, which no route changes; every token of a choice is predicted by
a decode step under the route. Where intervals overlap accuracy says nothing, and
answers equal to the unmodified model's, agreement and perplexity say more.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_edge.bench.engines import describe_model
from moe_edge.bench.fidelity.rows import forced_rows
from moe_edge.bench.fidelity.study import ForcedText
from moe_edge.bench.rounds import interval_panel
from moe_edge.bench.study import Claim, Findings, Study
from moe_edge.engine.load import check_checkpoint, load_engine
from moe_edge.engine.offload_options import OffloadOptions, resolve_offload
from moe_edge.evaluate.agreement import INTERVALS, compare
from moe_edge.evaluate.fidelity import SwitchEngine
from moe_edge.evaluate.multiple_choice import (
    Question,
    accuracy_of,
    answer_questions,
    read_questions,
    short_questions,
    wilson_interval,
)
from moe_edge.evaluate.stepwise import score_batches, step_continuations
from moe_edge.evaluate.texts import find_file, read_text, sha256_of
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.metrics.results import interval_metric
from moe_edge.papers.smoe.substitute import Substitute

SETS = ("arc_challenge", "boolq", "hellaswag", "mmlu", "sciq", "wic", "winogrande")
ALL = "all sets"
# Table IV of the paper: accuracy in percent at alpha 0, 0.35, 0.6.
MODELS = ("Deepseek", "Xverse", "Qwen")
PAPER = {
    task: dict(zip(MODELS, rows, strict=True))
    for task, rows in {
        "GaoKao": ((27.2, 27.7, 25.9), (47.2, 47.5, 45.9), (73.5, 74.1, 71.7)),
        "WiC": ((50.7, 50.7, 50.4), (50.0, 50.2, 49.8), (60.5, 60.7, 60.1)),
        "triviaqa": ((59.3, 59.0, 57.6), (53.1, 53.8, 52.4), (69.3, 69.0, 67.9)),
        "race": ((70.0, 69.1, 68.6), (81.4, 80.9, 80.3), (80.0, 79.1, 79.6)),
        "gsm8k": ((51.4, 50.2, 48.8), (62.9, 61.2, 58.6), (85.7, 85.3, 83.3)),
    }.items()
}
LIMITS = (
    "The default model is tiny (16 M parameters): its accuracy near chance is expected "
    "and says nothing about substitution; the share of answers equal to the unmodified "
    "model's says more.",
    "Prompts are prefilled, where no route acts; substitution acts only on the few "
    "tokens of a choice. The text's tokens are all decoded.",
    "Intervals: Wilson for shares, bootstrap over blocks of 32 tokens for the "
    "perplexity ratio.",
    "Only questions short enough were asked; the sets stand in for the paper's.",
)
# Of metrics: the value, its interval, how many stand behind it.
MEASURES = {
    "accuracy": ("accuracy", "interval95", "n"),
    "same answer": ("same_answer", "same_interval95", "n"),
    "agreement on text": ("agreement", "agreement_interval95", "tokens"),
    "perplexity ratio on text": ("perplexity_ratio", "ratio_interval95", "tokens"),
}
SIZES = (
    *("max_tokens", "rows", "prompt_tokens", "forced_tokens"),
    *("device_memory", "batch_size"),
)
Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccuracySettings(ForcedText):
    """What is asked; `ForcedText` names model and text.

    Attributes:
      sets: multiple-choice files; `limit` questions of each, the first that have at
        most `max_tokens` tokens with any choice.
      a_values: of substitution, with the default weight rule; 0 is added.
      device_memory: budget of the experts.
      batch_size: choices, or rows of the text, that decode together.
    """

    sets: Sequence[str] = tuple(f"mcq/{name}.jsonl" for name in SETS)
    limit: int = 16
    max_tokens: int = 96
    a_values: Sequence[float] = (0.0, 0.1, 0.2, 0.35, 0.4, 0.5, 0.6)
    device_memory: str = "25%"
    batch_size: int = 3

    def options(self) -> OffloadOptions:
        """Of the offloaded engine."""
        return resolve_offload(self.device_memory, self.base)

    def paths(self) -> list[str]:
        """Of the sets."""
        return [find_file(path, self.data_dir) for path in self.sets]

    def room(self) -> dict[str, int]:
        """Rows and tokens whose KV cache an absolute budget must hold."""
        longest = max(self.max_tokens, self.prompt_tokens + self.forced_tokens)
        return {"batch": self.batch_size, "capacity": longest}


def check(settings: AccuracySettings) -> None:
    """Refuses files and a budget that cannot be used, without weights."""
    for path in settings.paths():
        read_questions([path], 1)
    read_text(settings.path)
    check_checkpoint(settings.checkpoint, offload=settings.options(), **settings.room())


def run(settings: AccuracySettings) -> Findings:
    """Measures accuracy and fidelity over a."""
    loaded, batch = load_engine(settings.checkpoint), settings.batch_size
    tokenizer, resident = loaded.tokenizer, loaded.engine
    paths, text_path = settings.paths(), settings.path
    size = settings.limit, settings.max_tokens
    tasks = {Path(p).stem: short_questions(tokenizer, p, *size) for p in paths}
    forced = forced_rows(settings, tokenizer)

    def answer(engine):
        asked = tokenizer, sum(tasks.values(), []), batch
        return answer_questions(engine, *asked, step_continuations)[1]

    expected, reference = answer(resident), score_batches(resident, forced, batch)
    switch = SwitchEngine(settings.checkpoint, settings.options(), **settings.room())
    accuracy, fidelity = [], []
    for a in sorted({0.0, *map(float, settings.a_values)}):
        route = Substitute(a)
        forced_run = switch.run(route, forced, batch)
        found = {"a": a, **vars(compare(forced_run, reference, settings.seed))}
        fidelity.append(found | {"changed_ratio": switch.route.changed_ratio})
        switch.start(route)
        accuracy += by_task(tasks, a, answer(switch.engine), expected)
        print(
            f"a={a:g}: accuracy {accuracy[-1]['accuracy']:.3f}, "
            f"same answers {accuracy[-1]['same_answer']:.3f}, "
            f"agreement {found['agreement']:.3f}, "
            f"perplexity x{found['perplexity_ratio']:.4f}",
            flush=True,
        )
    switch.close()
    answer, details = answer_of(accuracy, fidelity)
    numbers = {"accuracy": accuracy, "fidelity": fidelity}
    parts = zip(settings.sets, paths, tasks.values(), strict=True)
    return Findings(
        answer=answer,
        details=details,
        model=describe_model(settings.checkpoint, resident.weights, loaded.dtype),
        workload={
            "sets": {
                name: {"sha256": sha256_of(path), "questions": len(part)}
                for name, path, part in parts
            },
            "text": {"source": text_path.name, "sha256": sha256_of(text_path)},
            **{name: getattr(settings, name) for name in SIZES},
        },
        metrics=metric_rows(accuracy, fidelity),
        limits=LIMITS,
        seeds=[settings.seed],
        baselines=["resident model", "chance"],
        checks={
            "a = 0 answers every question as the resident model": all(
                row["same_answer"] == 1 for row in accuracy if row["a"] == 0
            ),
            "a = 0 agrees on every token": fidelity[0]["agreement"] == 1,
        },
        ours={
            f"{row['task']}, a={row['a']:g}": round(100 * row["accuracy"], 1)
            for row in accuracy
            if row["a"] in (0, 0.35, 0.6)
        },
        plot=lambda path: plot(path, accuracy, fidelity),
        files={
            "accuracy.json": json.dumps(numbers, indent=1),
            "table.md": table_of(accuracy, fidelity),
        },
        summary=numbers,
    )


def by_task(tasks: dict[str, list[Question]], a: float, lines, reference) -> Rows:
    """Accuracy of every set and of all together, and how many answers are the
    reference's; lines in the order of the sets."""
    rows, start = [], 0
    for task, questions in (tasks | {ALL: sum(tasks.values(), [])}).items():
        start = 0 if task == ALL else start
        part = slice(start, start := start + len(questions))
        pairs = zip(lines[part], reference[part], strict=True)
        same = sum(one["chosen_index"] == other["chosen_index"] for one, other in pairs)
        found = {"task": task, "a": a, **accuracy_of(questions, lines[part])}
        found["same_answer"] = same / len(questions)
        found["same_interval95"] = wilson_interval(same, len(questions))
        rows.append(found)
    return rows


def metric_rows(accuracy: Rows, fidelity: Rows) -> Rows:
    """All sets together at every a; each set is in table.md."""
    pairs = zip(tasks_of(accuracy)[ALL], fidelity, strict=True)
    return [
        interval_metric(
            f"substitute a={row['a']:g}", name, row[key], row[width], row[n]
        )
        for row in (together | found for together, found in pairs)
        for name, (key, width, n) in MEASURES.items()
    ]


def tasks_of(accuracy: Rows) -> dict[str, Rows]:
    """Rows of each set, in order of a."""
    tasks: dict[str, Rows] = {}
    for row in accuracy:
        tasks.setdefault(row["task"], []).append(row)
    return tasks


def verdict_of(rows: Rows) -> str:
    """What a set's accuracies over a say; the first row is a = 0."""
    low, high = rows[0]["interval95"]
    near = ", at chance" if low <= rows[0]["chance"] <= high else ""
    for row in rows:
        if row["interval95"][0] > high or row["interval95"][1] < low:
            return f"differs from a = 0 from a = {row['a']:g} on{near}"
    return f"not informative{near}"


def answer_of(accuracy: Rows, fidelity: Rows) -> tuple[str, list[str]]:
    """The answer and further sentences; says plainly what is not informative."""
    *single, together = tasks_of(accuracy).values()
    silent = sum(verdict_of(rows).startswith("not") for rows in single)
    first, last, end = together[0], together[-1], fidelity[-1]
    answer = (
        f"{silent} of {len(single)} sets are not informative; over all {first['n']} "
        f"questions accuracy is {100 * first['accuracy']:.1f} % at a = 0 and "
        f"{100 * last['accuracy']:.1f} % at a = {last['a']:g} "
        f"(chance {100 * first['chance']:.1f} %)."
    )
    return answer, [
        "Not informative: the 95 % intervals overlap with a = 0 at every a. Over all "
        f"questions: {verdict_of(together)}.",
        f"At a = {last['a']:g}, {100 * last['same_answer']:.1f} % of answers are the "
        f"unmodified model's; on text {100 * end['agreement']:.1f} % of tokens agree "
        f"and perplexity is x{end['perplexity_ratio']:.3f}.",
    ]


def table_of(accuracy: Rows, fidelity: Rows) -> str:
    """Markdown in the paper's form: a row a set, a column an a."""
    tasks = tasks_of(accuracy)
    table = [["set", "n", "chance", *(f"{row['a']:g}" for row in fidelity), "verdict"]]
    table.append(["---"] * len(table[0]))
    for task, rows in tasks.items():
        cells = [task, str(rows[0]["n"]), f"{100 * rows[0]['chance']:.1f}"]
        for row in rows:
            low, high = row["interval95"]
            cells.append(f"{100 * row['accuracy']:.1f} ± {50 * (high - low):.1f}")
        table.append([*cells, verdict_of(rows)])
    for name, rows, key, scale, form in (
        ("same answers", tasks[ALL], "same_answer", 100, ".1f"),
        ("agreement on text", fidelity, "agreement", 100, ".1f"),
        ("perplexity ratio", fidelity, "perplexity_ratio", 1, ".4f"),
        ("substituted", fidelity, "changed_ratio", 100, ".1f"),
    ):
        values = (f"{scale * row[key]:{form}}" for row in rows)
        table.append([name, "", "", *values, ""])
    head = "# Accuracy (%) over a, as in SMoE's table IV\n\n± is half of the 95 % "
    lines = (f"| {' | '.join(cells)} |" for cells in table)
    return head + "interval (Wilson).\n\n" + "\n".join(lines) + "\n"


def plot(path, accuracy: Rows, fidelity: Rows) -> None:
    """Accuracy of each set with its interval and chance, then fidelity on the text."""

    def panel(title: str, rows: Rows, key: str, interval: str, level=None) -> Panel:
        columns = ([row[name] for row in rows] for name in ("a", key, interval))
        label = key.replace("_", " ")
        return interval_panel(title, label, *columns, x_label="a", level=level)

    panels = [
        panel(task, rows, "accuracy", "interval95", ("chance", rows[0]["chance"]))
        for task, rows in tasks_of(accuracy).items()
    ]
    for key, interval in INTERVALS.items():
        panels.append(panel("text", fidelity, key, interval))
    draw_panels(path, panels, title="Accuracy and fidelity over a", columns=3)


STUDY = Study(
    name="smoe_table4",
    question="Does accuracy fall with SMoE's a (SMoE table IV)?",
    settings=AccuracySettings,
    measure=run,
    check=check,
    claim=Claim(
        source="SMoE, table IV: accuracy (%) at alpha 0, 0.35 and 0.6",
        paper=PAPER,
        why="The paper's models have 16 to 57 B parameters and answer well above "
        "chance; where a model answers near chance, no fall can show. The paper's own "
        "differences below a = 0.35 lie within the interval of its 1,000 questions "
        "(about 3 points).",
    ),
)

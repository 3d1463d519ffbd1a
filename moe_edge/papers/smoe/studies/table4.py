"""SMoE, table IV: multiple-choice accuracy over a, with fidelity on a text.

Prompts are prefilled, which no route changes; every token of a choice is predicted by
a decode step under the route. Where intervals overlap accuracy says nothing, and
answers equal to the unmodified model's, agreement and perplexity say more.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from moe_edge.bench.engines import describe_model
from moe_edge.bench.fidelity.rows import forced_rows
from moe_edge.bench.fidelity.study import ForcedText
from moe_edge.bench.settings import Budget, Margin
from moe_edge.bench.study import Study
from moe_edge.engine.load import check_checkpoint, load_engine
from moe_edge.engine.offload_options import OffloadOptions, resolve_offload
from moe_edge.evaluate.agreement import Agreement, compare
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
from moe_edge.metrics.frames import HIGH, LOW, N, Rows, Tables, frame, interval
from moe_edge.papers.smoe.substitute import Substitute

SETS = ("arc_challenge", "boolq", "hellaswag", "mmlu", "sciq", "wic", "winogrande")
ALL = "all sets"
SIZES = (
    *("max_tokens", "rows", "prompt_tokens", "forced_tokens"),
    *("device_memory", "batch_size"),
)
Lines = list[dict[str, Any]]  # accuracy of a set at an a


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
    a_values: Sequence[Margin] = (0.0, 0.1, 0.2, 0.35, 0.4, 0.5, 0.6)
    device_memory: Budget = "25%"
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


def measure(settings: AccuracySettings, rows: Rows) -> None:
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
    for a in sorted({0.0, *map(float, settings.a_values)}):
        route = Substitute(a)
        run = compare(switch.run(route, forced, batch), reference, settings.seed)
        tell_text(rows, a, run, switch.route.changed_ratio)
        switch.start(route)
        tell_answers(rows, a, by_task(tasks, answer(switch.engine), expected))
        print(
            f"a={a:g}: agreement {run.agreement:.3f}, "
            f"perplexity x{run.perplexity_ratio:.4f}",
            flush=True,
        )
    switch.close()
    parts = zip(settings.sets, paths, tasks.values(), strict=True)
    rows.about |= {
        "model": describe_model(settings.checkpoint, resident.weights, loaded.dtype),
        "workload": {
            "sets": {
                name: {"sha256": sha256_of(path), "questions": len(part)}
                for name, path, part in parts
            },
            "text": {"source": text_path.name, "sha256": sha256_of(text_path)},
            **{name: getattr(settings, name) for name in SIZES},
        },
        "seeds": [settings.seed],
        "baselines": ["resident model", "chance"],
    }


def tell_text(rows: Rows, a: float, run: Agreement, changed_ratio: float) -> None:
    """Adds the fidelity on the text at an a."""
    ratio = interval(run.perplexity_ratio, run.ratio_interval95, run.tokens)
    rows(
        "text",
        a,
        agreement=interval(run.agreement, run.agreement_interval95, run.tokens),
        perplexity_ratio=ratio,
        perplexity=run.perplexity,
        moved_nats=run.moved_nats,
        changed_ratio=changed_ratio,
    )


def tell_answers(rows: Rows, a: float, lines: Lines) -> None:
    """Adds the accuracy of every set at an a."""
    for one in lines:
        rows(
            "answers",
            one["task"],
            a,
            accuracy=interval(one["accuracy"], one["interval95"], one["n"]),
            same_answer=interval(one["same_answer"], one["same_interval95"], one["n"]),
            chance=one["chance"],
        )


def by_task(tasks: dict[str, list[Question]], lines, reference) -> Lines:
    """Accuracy of every set and of all together, and how many answers are the
    reference's; lines in the order of the sets."""
    rows, start = [], 0
    for task, questions in (tasks | {ALL: sum(tasks.values(), [])}).items():
        start = 0 if task == ALL else start
        part = slice(start, start := start + len(questions))
        pairs = zip(lines[part], reference[part], strict=True)
        same = sum(one["chosen_index"] == other["chosen_index"] for one, other in pairs)
        found = {"task": task, **accuracy_of(questions, lines[part])}
        found["same_answer"] = same / len(questions)
        found["same_interval95"] = wilson_interval(same, len(questions))
        rows.append(found)
    return rows


def verdict_of(rows: pd.DataFrame) -> str:
    """What a set's accuracies over a say; the first row is a = 0."""
    first = rows.iloc[0]
    low, high = first.accuracy_low, first.accuracy_high
    near = ", at chance" if low <= first.chance <= high else ""
    apart = rows[(rows.accuracy_low > high) | (rows.accuracy_high < low)]
    if len(apart):
        return f"differs from a = 0 from a = {apart.a.iloc[0]:g} on{near}"
    return f"not informative{near}"


def derive(tables: Tables) -> dict[str, Any]:
    """What each set and all of them say, and all measures over a."""
    answers, text = tables["answers"], tables["text"]
    verdicts = pd.DataFrame(
        {"set": name, "n": rows.accuracy_n.iloc[0], "chance": rows.chance.iloc[0]}
        | {"verdict": verdict_of(rows)}
        for name, rows in answers.groupby("set", sort=False)
    )
    single = verdicts[verdicts["set"] != ALL]
    together = answers[answers["set"] == ALL]
    shown = ["a", *(f"same_answer{end}" for end in ("", N, LOW, HIGH))]
    over_a = together[shown].merge(text)
    silent = single.verdict.str.startswith("not")
    return {
        "verdicts": verdicts,
        "silent": silent.sum(),
        "num_sets": len(single),
        "first": together.iloc[0].to_dict(),
        "last": together.iloc[-1].to_dict() | over_a.iloc[-1].to_dict(),
        "over_a": over_a,
        "checks": {
            "a = 0 answers every question as the resident model": (
                answers.same_answer[answers.a == 0] == 1
            ).all(),
            "a = 0 agrees on every token": text.agreement[0] == 1,
        },
    }


FRAMES = {
    "answers": frame("set a", "accuracy same_answer chance"),
    "text": frame(
        "a", "agreement perplexity_ratio perplexity moved_nats:nats changed_ratio"
    ),
}
STUDY = Study("smoe_table4", AccuracySettings, measure, FRAMES, derive, check=check)

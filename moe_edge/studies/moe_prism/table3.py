"""MoE-Prism, table 3: multiple-choice accuracy at three eighths of the compute."""

from pathlib import Path

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import ConfigError
from moe_edge.engine.load import load_engine
from moe_edge.evaluate.multiple_choice import (
    answer_questions,
    short_questions,
    wilson_interval,
)
from moe_edge.evaluate.texts import find_path, sha256_of
from moe_edge.metrics.plots_panels import Panel, bar_panels
from moe_edge.metrics.results import metric
from moe_edge.studies.moe_prism.quality import model_of
from moe_edge.studies.moe_prism.settings import ORIGINAL, ElasticSettings
from moe_edge.studies.smoe.settings import Findings, claim

FULL = "all experts"
# Table 3, OLMoE at K' = 3 and its refactored model at K = 12 (percent).
PAPER = {
    "original": {
        "winogrande": 63.06,
        "arc_challenge": 46.08,
        "sciq": 87.60,
        "boolq": 64.46,
    },
    "LG-FT": {
        "winogrande": 64.33,
        "arc_challenge": 46.33,
        "sciq": 89.70,
        "boolq": 67.65,
    },
}
WHY = (
    "A model as small as ours answers these questions hardly better than chance, and "
    "the sets are samples: where intervals overlap accuracy cannot tell models apart, "
    "and table 2's perplexity is the measure. The paper prompts with 0 to 5 examples, "
    "we with none."
)


def run(settings: ElasticSettings) -> tuple[dict, Findings]:
    """Answers every set with every model at `k_values[0]`, and with all experts.

    Raises:
      ConfigError: no sets, or a K that the parent has no whole experts for.
    """
    if not settings.sets:
        raise ConfigError("sets is empty, expected multiple-choice files")
    paths = settings.checkpoints()
    parent = load_engine(paths.pop(ORIGINAL))
    found_paths = [find_path(name, settings.data_dir) for name in settings.sets]
    tasks = {
        Path(path).stem: short_questions(
            parent.tokenizer, path, settings.limit, settings.question_tokens
        )
        for path in found_paths
    }
    questions = [question for part in tasks.values() for question in part]
    K = settings.k_values[0]
    subs = {open_checkpoint(path).config.moe.sub_experts for path in paths.values()}
    subs = subs.pop()  # one number: elastic_models.check_models
    if K % subs:
        raise ConfigError(f"K = {K} is no multiple of the {subs} sub-experts an expert")

    def answer(engine) -> list[bool]:
        lines = answer_questions(engine, parent.tokenizer, questions, 8)[1]
        return [line["chosen_index"] == line["answer_index"] for line in lines]

    right: dict[str, list[bool]] = {}
    for name, path in paths.items():
        engine = load_engine(path, with_tokenizer=False).engine
        right[name] = answer(engine.at_k(K))
    right = {
        FULL: answer(parent.engine),
        ORIGINAL: answer(parent.engine.at_k(K // subs)),
    } | right
    sources = [
        {"path": name, "sha256": sha256_of(path)}
        for name, path in zip(settings.sets, found_paths, strict=True)
    ]
    return model_of(parent), findings(right, tasks, sources, settings)


def findings(right, tasks, sources, settings: ElasticSettings) -> Findings:
    """The entry from what was answered."""
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
    K = settings.k_values[0]
    means = {
        name: sum(found[task][0] for task in tasks) / len(tasks)
        for name, found in accuracy.items()
    }
    entry = {
        "question": f"Do sub-experts keep accuracy at K = {K} (MoE-Prism, table 3)?",
        "answer": f"Not informative in {len(unclear)} of {len(tasks)} sets (95 % "
        "intervals overlap). Mean accuracy: "
        + ", ".join(f"{name} {value:.3f}" for name, value in means.items())
        + f"; chance {sum(chance.values()) / len(chance):.3f}.",
        "kind": "measured",
        "workload": {
            "sets": sources,
            "questions": {task: len(part) for task, part in tasks.items()},
            "K": K,
        },
        "metrics": rows,
        "baselines": [FULL, ORIGINAL, "chance"],
        "checks": {},
        "limits": settings.limits(),
        "paper_claim": claim(
            "MoE-Prism, table 3, OLMoE (percent)",
            PAPER,
            {
                name: {task: round(100 * value[0], 1) for task, value in found.items()}
                for name, found in accuracy.items()
                if name != FULL
            },
            settings.why(WHY),
        ),
    }

    def plot(path) -> None:
        series = {n: [found[t][0] for t in tasks] for n, found in accuracy.items()}
        spreads = {
            n: [(found[t][2] - found[t][1]) / 2 for t in tasks]
            for n, found in accuracy.items()
        }
        series["chance"] = list(chance.values())
        panel = Panel("", "accuracy", list(tasks), series, spreads)
        bar_panels(path, [panel], title=f"Accuracy at K = {K}, 95 % intervals")

    return Findings(entry=entry, plot=plot, summary={"accuracy": means})

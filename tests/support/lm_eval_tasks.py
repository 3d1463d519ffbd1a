"""Tasks of the lm-evaluation-harness in files, with three questions."""

import json
import types
from pathlib import Path

from moe_edge.evaluate.multiple_choice import Question

QUESTIONS = [
    Question("a", "The river runs past the", ("old mill", "dog", "12 sacks"), 0),
    Question("b", "There are 12", ("sacks", "cats of flour"), 0),
    Question("c", "How many", ("miller", "sacks are there?"), 1),
]
TASK = """
task: tiny_{kind}
dataset_path: json
dataset_kwargs:
  data_files:
    test: questions.jsonl
test_split: test
output_type: {output}
doc_to_text: "{{{{prompt}}}}"
doc_to_target: {target}
{more}
"""
CHOICE = """
doc_to_choice: "{{choices}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
"""
UNTIL = """
generation_kwargs:
  until: ["."]
  max_gen_toks: 6
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
ROLLING = """
metric_list:
  - metric: byte_perplexity
"""


def write_tasks(folder: Path) -> Path:
    """Writes tiny_choice, tiny_until and tiny_rolling with their data."""
    folder.mkdir()
    rows = [
        {"prompt": q.prompt, "choices": q.choices, "answer": q.answer}
        for q in QUESTIONS
    ]
    lines = [json.dumps(row) for row in rows]
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n")
    for kind, output, target, more in (
        ("choice", "multiple_choice", "answer", CHOICE),
        ("until", "generate_until", '"any"', UNTIL),
        ("rolling", "loglikelihood_rolling", '"{{prompt}}"', ROLLING),
    ):
        text = TASK.format(kind=kind, output=output, target=target, more=more)
        (folder / f"{kind}.yaml").write_text(text)
    return folder


def engine_lm(loaded, **options):
    """The adapter on a loaded engine; imported late, for it needs the extra `eval`."""
    from moe_edge.evaluate.lm_eval_adapter import EngineLM

    return EngineLM(loaded.engine, loaded.tokenizer, **options)


def as_requests(*arguments):
    """What the harness hands over, as far as the adapter reads it."""
    return [types.SimpleNamespace(args=args) for args in arguments]

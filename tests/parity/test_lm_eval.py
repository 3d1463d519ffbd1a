"""The lm-evaluation-harness on our engines (extra `eval`); imports are in the tests.

Without the extra these tests fail; the marker alone keeps them out of a plain run.
"""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.engine.generate import generate
from moe_edge.engine.load import load_engine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.prompts import decode_after
from moe_edge.evaluate.multiple_choice import Question, answer_questions
from moe_edge.evaluate.perplexity import measure_perplexity
from moe_edge.evaluate.run_lm_eval import run_lm_eval
from tests.support.tiny_checkpoint import TEXT, write_tiny_checkpoint

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).parents[2]
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


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def loaded(checkpoint):
    return load_engine(checkpoint)


def _model(loaded, **options):
    from moe_edge.evaluate.lm_eval_adapter import EngineLM

    return EngineLM(loaded.engine, loaded.tokenizer, **options)


def _requests(*arguments):
    return [types.SimpleNamespace(args=args) for args in arguments]


@pytest.mark.parametrize("mode", [None, "layered", "fused"])
def test_loglikelihood_equals_multiple_choice(checkpoint, loaded, mode):
    if mode is not None:
        offload = OffloadOptions(device_memory="60%", mode=mode)
        loaded = load_engine(checkpoint, offload=offload)
    arguments = [(q.prompt, f" {choice}") for q in QUESTIONS for choice in q.choices]
    found = _model(loaded, batch_size=3).loglikelihood(_requests(*arguments))
    _, lines = answer_questions(loaded.engine, loaded.tokenizer, QUESTIONS)
    want = [
        score * len(choice.encode())
        for line, question in zip(lines, QUESTIONS, strict=True)
        for score, choice in zip(line["nats_per_byte"], question.choices, strict=True)
    ]
    np.testing.assert_allclose([score for score, _ in found], want, rtol=1e-5)
    assert not any(is_greedy for _, is_greedy in found)  # a random model
    loaded.engine.close()


def test_loglikelihood_of_what_the_model_generates_is_greedy(loaded):
    prompt = loaded.tokenizer.encode("The river")
    ids = generate(loaded.engine, [prompt], 3).tokens[0]
    row = (None, prompt, ids)
    ((_, is_greedy),) = _model(loaded)._loglikelihood_tokens([row])
    assert is_greedy
    ids[1] = (ids[1] + 1) % 300
    ((_, is_greedy),) = _model(loaded)._loglikelihood_tokens([row])
    assert not is_greedy


@pytest.mark.parametrize("tokens", [40, 4 * 64])
def test_loglikelihood_rolling_equals_perplexity(loaded, tokens):
    ids = loaded.tokenizer.encode(TEXT * 20)[:tokens]
    text = loaded.tokenizer.decode(ids)
    assert loaded.tokenizer.encode(text) == ids
    model = _model(loaded, batch_size=2)
    model.max_length = 64
    found = model.loglikelihood_rolling(_requests((text,), ("The",)))
    # The harness puts a token before the text and scores every token once, in windows
    # of 64 inputs: ours of 65 tokens, targets included, that advance by 64.
    ours = measure_perplexity(loaded.engine, [0, *ids], window=65, stride=64)
    assert ours.tokens == tokens
    np.testing.assert_allclose(found[0], -ours.nll, rtol=1e-5)
    assert found[1] < 0


def test_loglikelihood_long_context_loses_its_left_end(loaded):
    long = "The river runs past the old mill. " * 20
    model = _model(loaded)
    ids = model.tok_encode(long + " dog")
    assert len(ids) > 129
    wanted = ids[len(model.tok_encode(long.rstrip())) :]
    ((got, _),) = model.loglikelihood(_requests((long.rstrip(), "  dog")))
    row = (None, ids[-129 : -len(wanted)], wanted)
    assert got == model._loglikelihood_tokens([row])[0][0]


def test_generate_until_equals_generate(loaded):
    texts = ["The river runs", "How many sacks"]
    options = [{"max_gen_toks": 6, "until": []}, {"max_gen_toks": 4, "until": "\x07"}]
    found = _model(loaded).generate_until(_requests(*zip(texts, options, strict=True)))
    for text, option, got in zip(texts, options, found, strict=True):
        prompt = loaded.tokenizer.encode(text)
        run = generate(loaded.engine, [prompt], option["max_gen_toks"])
        assert got == decode_after(loaded.tokenizer, prompt, run.tokens[0])


def _write_tasks(folder: Path) -> Path:
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


def test_local_tasks_end_to_end_by_script(tmp_path, checkpoint, loaded):
    folder, out = _write_tasks(tmp_path / "tasks"), tmp_path / "out"
    command = [sys.executable, "launch/lm_eval.py", f"--checkpoint={checkpoint}"]
    command += ["--tasks=tiny_choice,tiny_until,tiny_rolling"]
    command += [f"--include_path={folder}", f"--out_dir={out}", "--batch_size=4"]
    environment = os.environ | {
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",  # nothing is asked of the hub
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    ours, _ = answer_questions(loaded.engine, loaded.tokenizer, QUESTIONS)
    choice = summary["tasks"]["tiny_choice"]
    assert choice["acc_norm,none"] == pytest.approx(ours["accuracy"])
    assert summary["n"] == dict.fromkeys(summary["tasks"], 3)
    assert summary["tasks"]["tiny_until"]["exact_match,none"] == 0.0
    rolling = summary["tasks"]["tiny_rolling"]["byte_perplexity,none"]
    prompts = [q.prompt for q in QUESTIONS]
    nats = -sum(
        _model(loaded).loglikelihood_rolling(_requests(*((p,) for p in prompts)))
    )
    size = sum(len(prompt.encode()) for prompt in prompts)
    assert rolling == pytest.approx(np.exp(nats / size), rel=1e-5)
    stored = json.loads((out / "evaluation.json").read_text())
    assert stored["tasks"] == summary["tasks"]


def test_run_lm_eval_bad_tasks_are_refused(tmp_path, checkpoint):
    folder = _write_tasks(tmp_path / "tasks")
    options = {"out_dir": str(tmp_path / "out"), "checkpoint": str(checkpoint)}
    with pytest.raises(ConfigError, match="unknown task 'arc'; known: tiny_choice, "):
        run_lm_eval(tasks="tiny_choice,arc", include_path=str(folder), **options)
    with pytest.raises(ConfigError, match="include_path nowhere is not a folder"):
        run_lm_eval(tasks="arc", include_path="nowhere", **options)
    with pytest.raises(ConfigError, match="no task named"):
        run_lm_eval(tasks=" ,", include_path=str(folder), **options)
    (folder / "questions.jsonl").unlink()
    with pytest.raises(
        RequestError, match="tiny_choice cannot be loaded: FileNotFound"
    ):
        run_lm_eval(tasks="tiny_choice", include_path=str(folder), **options)
    assert not (tmp_path / "out").exists()

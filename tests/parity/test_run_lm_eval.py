"""launch/lm_eval.py on tasks in files (extra `eval`); see test_lm_eval.py."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, ConfigError, RequestError
from moe_edge.engine.load import load_engine
from moe_edge.evaluate import run_lm_eval as module
from moe_edge.evaluate.multiple_choice import answer_questions
from moe_edge.evaluate.run_lm_eval import run_lm_eval
from tests.support.lm_eval_tasks import (
    QUESTIONS,
    as_requests,
    engine_lm,
    write_tasks,
)

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).parents[2]


def test_local_tasks_end_to_end_by_script(tmp_path, checkpoint, loaded):
    folder, out = write_tasks(tmp_path / "tasks"), tmp_path / "out"
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
        engine_lm(loaded).loglikelihood_rolling(as_requests(*((p,) for p in prompts)))
    )
    size = sum(len(prompt.encode()) for prompt in prompts)
    assert rolling == pytest.approx(np.exp(nats / size), rel=1e-5)
    stored = json.loads((out / "evaluation.json").read_text())
    assert stored["tasks"] == summary["tasks"]


def test_run_lm_eval_names_the_memory_that_it_runs_in(tmp_path, checkpoint):
    """For its own batch: one row was assumed, so that no size let eight run."""
    folder = write_tasks(tmp_path / "tasks")
    given = {"out_dir": str(tmp_path / "out"), "checkpoint": str(checkpoint)}
    given |= {"tasks": "tiny_choice", "include_path": str(folder)}
    assumed = r"for 8 rows of \d+ tokens\); .* that is (\d+) bytes"
    with pytest.raises(CapacityError, match=assumed) as refused:
        run_lm_eval(**given, device_memory="1B", dry_run=True)
    least = re.search(assumed, str(refused.value))[1]
    assert run_lm_eval(**given, device_memory=f"{least}B", dry_run=True)
    found = run_lm_eval(**given, device_memory=f"{least}B")
    assert found["n"] == {"tiny_choice": 3}


def test_run_lm_eval_bad_tasks_are_refused(tmp_path, checkpoint):
    folder = write_tasks(tmp_path / "tasks")
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


def test_run_lm_eval_relative_include_path(tmp_path, checkpoint):
    write_tasks(tmp_path / "tasks")
    with contextlib.chdir(tmp_path):
        summary = run_lm_eval(
            tasks="tiny_until",
            include_path="tasks",
            checkpoint=str(checkpoint),
            out_dir=str(tmp_path / "out"),
        )
    assert summary["n"] == {"tiny_until": 3}


def test_run_lm_eval_task_that_cannot_run_closes_the_engine(
    tmp_path, checkpoint, monkeypatch
):
    folder, closed = write_tasks(tmp_path / "tasks"), []

    def load(*args, **options):
        found = load_engine(*args, **options)
        close = found.engine.close
        monkeypatch.setattr(
            found.engine, "close", lambda: (closed.append(1), close()), raising=False
        )
        return found

    monkeypatch.setattr(module, "load_engine", load)
    options = {"include_path": str(folder), "checkpoint": str(checkpoint)}
    with pytest.raises(RequestError, match="tasks tiny_choice cannot be run: ValueErr"):
        run_lm_eval(
            tasks="tiny_choice", num_fewshot=9, out_dir=str(tmp_path / "o"), **options
        )
    text = (folder / "until.yaml").read_text()
    (folder / "until.yaml").write_text(
        text.replace("max_gen_toks: 6", "max_tokens: 999")
    )
    with pytest.raises(CapacityError, match="^max_gen_toks 999 leaves no room"):
        run_lm_eval(tasks="tiny_until", out_dir=str(tmp_path / "o"), **options)
    assert closed == [1, 1] and not (tmp_path / "o").exists()

"""OD-MoE by launch/cluster.py, in processes of its own."""

import json

import numpy as np
import pytest

from moe_edge.papers.od_moe.shadow.recall import recall

PROMPTS = ["The river runs past", "How many sacks are there?"]


@pytest.mark.slow
def test_processes_give_the_models_tokens_when_a_worker_is_killed(
    run_script, run_process, tiny, tmp_path
):
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": str(i), "prompt": p}) for i, p in enumerate(PROMPTS)]
    prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    both = "--checkpoint", tiny, "--prompts", prompts, "--max_new_tokens", 12
    alone = run_script("generate", *both, "--batch_size", 1, "--out_dir", "alone")
    assert alone.code == 0, alone.stderr
    options = "--mode", "od_moe", "--workers", 2, "--groups", 1, "--shadow", "full"
    drill = "--drill", "kill:worker0@9"
    done = run_process("cluster", *both, *options, *drill, "--out_dir", "run")
    row = done.summary
    assert row["recall"] == 1.0 and row["same_tokens"] and row["lost_requests"] == 0
    assert [failure["kind"] for failure in row["failures"]] == ["dead"]
    assert row["compiled_after_warmup"] == 0
    texts = [
        {
            line["id"]: (line["text"], line["tokens"])
            for line in map(json.loads, (tmp_path / name).read_text().splitlines())
        }
        for name in ("alone/generations.jsonl", "run/generations.jsonl")
    ]
    assert texts[0] == texts[1]
    with np.load(tmp_path / "run" / "predictions.npz") as stored:
        assert sorted(stored) == ["actual_NLK", "index", "predicted_NLK", "request"]
        found = recall(stored["actual_NLK"], stored["predicted_NLK"])
    assert found == row["recall"]
    names = "scheduler", "main", "shadow", "worker0", "worker1"
    logs = {path.stem: path.read_text() for path in tmp_path.glob("run/logs/*.log")}
    assert sorted(logs) == sorted(names)
    assert not any("Traceback" in text for text in logs.values())

import json

import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, ConfigError, OutputError, RequestError
from moe_edge.evaluate.run import run_evaluate
from tests.support.tiny_checkpoint import TEXT


def evaluate(tmp_path, tiny, **kwargs):
    return run_evaluate(out_dir=str(tmp_path / "o"), checkpoint=tiny, **kwargs)


def test_evaluate_text_prints_the_interface_keys(run_script, tiny, tmp_path):
    (tmp_path / "t.txt").write_text(TEXT * 5)
    flags = ["--checkpoint", tiny, "--text", "t.txt", "--window", 32, "--stride", 16]
    flags += ["--batch_size", 2]
    done = run_script("evaluate", *flags, "--out_dir", "o")
    summary = done.summary
    assert (summary["window"], summary["stride"]) == (32, 16)
    assert done.stdout.startswith(
        f"perplexity {summary['perplexity']:.4g} over {summary['tokens']} tokens, in "
        f"windows of 32 that begin every 16; {summary['nats_per_byte']:.4g} nats a byte"
    )
    assert summary["checkpoint_hf"] == str(tiny)
    assert 1 < summary["perplexity"] < 5000
    stored = json.loads((tmp_path / "o" / "evaluation.json").read_text())
    assert stored["perplexity"] == summary["perplexity"]
    assert stored["source"][0]["path"] == "t.txt"
    assert len(stored["source"][0]["sha256"]) == 64
    assert (tmp_path / "o" / "config.gin").exists()


def test_evaluate_writes_logits(run_script, tiny, tmp_path):
    tokens = np.random.default_rng(0).integers(1, 320, (2, 40))
    np.save(tmp_path / "t.npy", tokens)
    flags = ["--checkpoint", tiny, "--tokens", "t.npy", "--logits", "l.npz"]
    summary = run_script("evaluate", *flags, "--out_dir", "o").summary
    assert summary["shape"] == [2, 40, 320] and summary["out_dir"] == "o"
    stored = json.loads((tmp_path / "o" / "evaluation.json").read_text())
    assert (stored["mode"], stored["source"][0]["path"]) == ("tokens", "t.npy")
    assert "evaluate.tokens = 't.npy'" in (tmp_path / "o" / "config.gin").read_text()
    with np.load(tmp_path / "l.npz") as file:
        assert file["logits"].dtype == np.float32
        assert np.isfinite(file["logits"]).all()


def test_evaluate_mcq_writes_a_line_a_question(tiny, tmp_path, capsys):
    rows = [
        {"id": "q/0", "prompt": "How many", "choices": ["12", "3"], "answer_index": 0},
        {"id": "q/1", "prompt": "x" * 300, "choices": ["a", "b"], "answer_index": 1},
    ]
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    summary = evaluate(tmp_path, tiny, mcq=f"{path},{path}", batch_size=2)
    assert {"accuracy", "n", "interval95", "chance"} <= set(summary)
    assert (summary["n"], summary["chance"], summary["truncated"]) == (4, 0.5, 2)
    lines = (tmp_path / "o" / "questions.jsonl").read_text().splitlines()
    assert [json.loads(line)["truncated"] for line in lines] == [False, True] * 2
    assert "2 of 4 questions lost their left end" in capsys.readouterr().err


def test_evaluate_data_dir_is_looked_up(tiny, tmp_path):
    (tmp_path / "t.txt").write_text(TEXT)
    summary = evaluate(
        tmp_path, tiny, text="t.txt", data_dir=str(tmp_path), dry_run=True
    )
    assert summary["dry_run"] is True
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    "given, message",
    [
        ({}, "exactly one of --text, .* got none"),
        ({"text": "a", "mcq": "b"}, "got --text and --mcq"),
        ({"tokens": "t.npy"}, "belong together"),
        ({"text": "a", "logits": "l.npz"}, "belong together"),
        ({"text": "a", "batch_size": 0}, "batch_size must be positive, got 0"),
        ({"mcq": "a", "limit": 0}, "limit must be positive, got 0"),
    ],
)
def test_evaluate_rejects_flags_that_do_not_fit(tiny, tmp_path, given, message):
    with pytest.raises(ConfigError, match=message):
        evaluate(tmp_path, tiny, **given)


def test_evaluate_rejects_window_beyond_context(tiny, tmp_path):
    (tmp_path / "t.txt").write_text(TEXT)
    with pytest.raises(CapacityError, match="window of 129 .* context of 128"):
        evaluate(tmp_path, tiny, text=str(tmp_path / "t.txt"), window=129)


def test_evaluate_rejects_tokens_outside_the_vocabulary(tiny, tmp_path):
    np.save(tmp_path / "t.npy", np.full((1, 4), 320))
    paths = {"tokens": str(tmp_path / "t.npy"), "logits": str(tmp_path / "l.npz")}
    with pytest.raises(RequestError, match="token id 320, expected 0..319"):
        evaluate(tmp_path, tiny, **paths)
    assert not (tmp_path / "l.npz").exists()


def test_evaluate_rejects_logits_inside_the_results_folder(tiny, tmp_path):
    np.save(tmp_path / "t.npy", np.ones((1, 4), int))
    paths = {"tokens": str(tmp_path / "t.npy"), "logits": str(tmp_path / "o/l.npz")}
    with pytest.raises(OutputError, match="l.npz is inside the results folder"):
        evaluate(tmp_path, tiny, **paths)


def test_evaluate_rejects_existing_logits_file(tiny, tmp_path):
    np.save(tmp_path / "t.npy", np.ones((1, 4), int))
    (tmp_path / "l.npz").write_text("mine")
    paths = {"tokens": str(tmp_path / "t.npy"), "logits": str(tmp_path / "l.npz")}
    with pytest.raises(OutputError, match="l.npz exists"):
        evaluate(tmp_path, tiny, **paths)
    assert (tmp_path / "l.npz").read_text() == "mine"


def test_evaluate_missing_text_is_one_line(run_script):
    error = "--text none.txt is not here and no --data_dir was given; name the folder"
    assert error in run_script("evaluate", "--text", "none.txt").error

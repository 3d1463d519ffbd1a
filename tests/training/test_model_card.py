"""The model card: from a tiny run to a folder with pictures."""

import json
import shutil

import numpy as np
import pytest

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import ConfigError, OutputError
from moe_edge.training import evaluation
from moe_edge.training.model_card import read_metrics, run_model_card
from tests.training.conftest import make_eval_step


def make_card(folder, name, **options):
    run_dir, out_dir = str(folder / "run"), str(folder / name)
    return run_model_card(run_dir=run_dir, out_dir=out_dir, **options)


def test_run_model_card_writes_folder_that_loads(tiny_run, tmp_path, monkeypatch):
    shutil.copytree(tiny_run[0], tmp_path / "run")
    monkeypatch.setattr(evaluation, "make_eval_step", make_eval_step)
    out = tmp_path / "out"
    options = {"eval_rows": 2, "config_text": lambda: "a.b = 1"}
    dry = make_card(tmp_path, "out", **options, dry_run=True)
    assert dry["dry_run"] and not out.exists()
    summary = make_card(tmp_path, "out", **options)
    assert (out / "config.gin").read_text() == "a.b = 1"
    card = (out / "README.md").read_text()
    assert "| code | 72% | Python standard library" in card
    assert f"{summary['perplexity']['stories']:.2f}" in card
    for name in ("loss.png", "routing_entropy.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert open_checkpoint(out).config.moe.num_experts == 4
    with pytest.raises(OutputError, match="is not empty"):
        make_card(tmp_path, "out")
    for name in ("settings.json", "checkpoints"):
        (tmp_path / "run" / name).rename(tmp_path / name)
        with pytest.raises(ConfigError, match=rf"{name} is missing|no training check"):
            make_card(tmp_path, "x", dry_run=True)
        (tmp_path / name).rename(tmp_path / "run" / name)
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    del settings["balance"]
    (tmp_path / "run" / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"lacks \['balance'\], which the card"):
        make_card(tmp_path, "x", dry_run=True)


def test_read_metrics_orders_rows_and_adds_the_mean_held_out_loss(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"tokens": 20, "held_out": {"a": 1.0, "b": 3.0}}, {"tokens": 10, "loss": 5}]
    path.write_text("\n".join(map(json.dumps, rows)))
    got = read_metrics(path)
    assert [row["tokens"] for row in got] == [10, 20]
    np.testing.assert_allclose(got[1]["held_out_loss"], 2.0)


def test_read_metrics_repeated_step_counts_as_the_last_time(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"tokens": 5, "loss": 3.0}, {"tokens": 9, "loss": 2.0}]
    rows += [{"tokens": 5, "loss": 2.5}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["loss"] for row in read_metrics(path)] == [2.5, 2.0]


def test_read_metrics_rejects_folder_that_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match="metrics.jsonl is missing"):
        read_metrics(tmp_path / "metrics.jsonl")

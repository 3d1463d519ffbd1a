"""Router fine-tuning end to end on a tiny checkpoint."""

import json

import numpy as np
import pytest

from moe_edge.checkpoint.checksums import item_crc32
from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.stream import content_sha256
from moe_edge.core.checks import ConfigError
from moe_edge.engine.load import load_engine
from moe_edge.evaluate.perplexity import measure_perplexity
from moe_edge.papers.moe_prism.refactor.finetune import train
from moe_edge.papers.moe_prism.refactor.finetune.settings import FineTuning
from tests.papers.moe_prism.support.tiny_finetuning import (
    OPTIONS,
    finetune_tiny,
    windows_of,
    write_source,
)

pytestmark = pytest.mark.slow  # whole runs: minutes of compilation


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def result(source):
    """A run of 6 steps with its result's folder and its compiled programs."""
    runs = []

    class Watched(train.Training):
        def __init__(self, *args):
            super().__init__(*args)
            runs.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "Training", Watched)
        summary = finetune_tiny(source, source / "tuned")
    return summary, source / "tuned", runs[0]


def test_finetune_router_lowers_loss_and_reports(result):
    summary, out, _ = result
    assert summary["finished"] and (summary["step"], summary["tokens"]) == (6, 384)
    assert summary["k_values"] == [2, 4]
    for k in (2, 4):
        assert summary["held_out_after"][k] < 0.97 * summary["held_out_before"][k]
    assert summary["trained_parameters"] == 2 * 16 * 24
    assert not out.with_name("tuned.training").exists()


def test_finetune_router_compiles_each_k_once(result):
    # Per K a gradient and an evaluation; and one update.
    assert result[2].num_compiled() == 2 * 2 + 1


def test_finetune_router_changes_router_rows_only(source, result):
    before, after = open_checkpoint(source / "model"), open_checkpoint(result[1])
    for name, array in before.top().items():
        assert array.tobytes() == after.top()[name].tobytes(), name
    for layer in range(2):
        old, new = before.dense(layer), after.dense(layer)
        for name, array in old.items():
            same = array.tobytes() == new[name].tobytes()
            assert same == (name != "router.weight"), name
        assert before.experts(layer).tobytes() == after.experts(layer).tobytes()
    weight_ED = after.dense(0)["router.weight"]
    assert np.abs(weight_ED[::2] - weight_ED[1::2]).max() > 0  # copies parted
    manifest = json.loads((result[1] / "manifest.json").read_text())
    assert manifest["refactor"] == before.manifest["refactor"] | {
        "fine_tuned": {
            "tokens": 384,
            "steps": 6,
            "learning_rate": 0.03,
            "teacher_kl": 0.0,
            "k_order": "rising",
            "k_start": 2,
            "k_end": 4,
            "text_sha256": result[0]["text_sha256"],
        }
    }
    assert manifest["content_sha256"] == content_sha256(after)
    assert manifest["content_sha256"] != before.content_sha256()
    old, new = before.checksums, after.checksums
    assert new.experts == old.experts and new.dense["top"] == old.dense["top"]
    assert new.dense[1] == item_crc32(after.dense(1)) != old.dense[1]


def test_finetune_router_reported_perplexity_is_the_written_model(source, result):
    engine = load_engine(result[1]).engine
    rows_NS = windows_of(source, FineTuning(**OPTIONS)).held_out
    parts = [measure_perplexity(engine, row.tolist(), window=17) for row in rows_NS]
    value = np.exp(sum(p.nll for p in parts) / sum(p.tokens for p in parts))
    np.testing.assert_allclose(result[0]["held_out_after"][4], value, rtol=1e-4)


def test_finetune_router_few_steps_train_k_end(source, tmp_path):
    # One step, although the settings ask for two K.
    summary = finetune_tiny(source, tmp_path / "out", tokens=64)
    assert (summary["steps"], summary["k_values"]) == (1, [4])
    assert [*summary["held_out_after"]] == [4]
    refactor = open_checkpoint(tmp_path / "out").manifest["refactor"]
    fine_tuned = refactor["fine_tuned"]
    assert (fine_tuned["k_start"], fine_tuned["k_end"]) == (4, 4)


def test_finetune_router_follows_the_model_as_it_was(source, result, tmp_path):
    given = {"teacher_kl": 100.0, "k_order": "drawn"}
    taught = finetune_tiny(source, tmp_path / "out", **given)
    moved = [
        abs(run["held_out_after"][4] / run["held_out_before"][4] - 1)
        for run in (taught, result[0])
    ]
    assert moved[0] < 0.5 * moved[1], "at its own K it is its own teacher"
    fine_tuned = open_checkpoint(tmp_path / "out").manifest["refactor"]["fine_tuned"]
    assert (fine_tuned["teacher_kl"], fine_tuned["k_order"]) == (100.0, "drawn")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_end": 17}, "1..16, got 17"),
        ({"k_start": 0}, "1..16, got 0"),
        ({"k_start": 2, "k_end": 1}, "k_start 2 exceeds k_end 1"),
        ({"tokens": 0}, "tokens must be a positive whole number, got 0"),
        ({"learning_rate": -1.0}, "learning_rate must be positive, got -1.0"),
        ({"batch_tokens": 40}, "batch_tokens 40 must be a multiple of .* 16"),
        ({"decay": 2.0}, "decay must lie in 0..1"),
        ({"k_order": "falling"}, "unknown k_order 'falling'; known: drawn, rising"),
        ({"teacher_kl": -1.0}, "teacher_kl must be 0 or more"),
    ],
)
def test_finetune_router_bad_settings_are_refused(source, change, message):
    with pytest.raises(ConfigError, match=message):
        FineTuning(**OPTIONS | change).check(open_checkpoint(source / "model").config)

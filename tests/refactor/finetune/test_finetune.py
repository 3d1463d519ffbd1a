"""Router fine-tuning end to end on a tiny checkpoint."""

import json
import shutil

import numpy as np
import pytest

from moe_edge.convert.content_hash import content_sha256
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CapacityError, ConfigError, OutputError, RequestError
from moe_edge.engine.load import load_engine
from moe_edge.evaluate.perplexity import measure_perplexity
from moe_edge.refactor.finetune import finetune, train
from moe_edge.refactor.finetune.finetune import finetune_router
from tests.support.refactored import write_random
from tests.support.tiny_finetuning import OPTIONS, finetune_tiny, write_source

pytestmark = pytest.mark.slow  # whole runs: minutes of compilation


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def result(source):
    """A run of 6 steps with its result's folder and its compiled programs."""
    runs = []

    class Watched(train.Run):
        def __init__(self, *args):
            super().__init__(*args)
            runs.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune, "Run", Watched)
        summary = finetune_tiny(source, source / "tuned")
    return summary, source / "tuned", runs[0]


def test_finetune_router_lowers_loss_and_reports(result):
    summary, out, _ = result
    assert summary["finished"] and (summary["step"], summary["tokens"]) == (6, 384)
    assert summary["k_values"] == [1, 2]
    for k in (1, 2):
        assert summary["held_out_after"][k] < 0.97 * summary["held_out_before"][k]
    assert summary["trained_parameters"] == 2 * 8 * 24
    assert not out.with_name("tuned.training").exists()


def test_finetune_router_does_not_replace_its_source(source, tmp_path):
    shutil.copytree(source / "model", tmp_path / "model")
    for out in (tmp_path / "model", tmp_path / "model" / "out"):
        with pytest.raises(OutputError, match="overlaps the source .*/model"):
            finetune_router(
                tmp_path / "model",
                str(source / "train.txt"),
                out,
                overwrite=True,
                **OPTIONS,
            )
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


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
    manifest = json.loads((result[1] / "manifest.json").read_text())
    assert manifest["fine_tuned"] == {
        "tokens": 384,
        "steps": 6,
        "learning_rate": 0.03,
        "k_start": 1,
        "k_end": 2,
        "text_sha256": result[0]["text_sha256"],
    }
    assert manifest["content_sha256"] != before.content_sha256()


def test_finetune_router_reported_perplexity_is_the_written_model(source, result):
    # The held-out text in windows of 16 that overlap by one token.
    loaded = load_engine(result[1])
    ids = loaded.tokenizer.encode((source / "held_out.txt").read_text())
    count = (len(ids) - 1) // 16
    picked = np.linspace(0, count - 1, 2).astype(int)
    parts = [
        measure_perplexity(loaded.engine, ids[16 * i : 16 * i + 17], window=17)
        for i in picked
    ]
    value = np.exp(sum(p.nll for p in parts) / sum(p.tokens for p in parts))
    np.testing.assert_allclose(result[0]["held_out_after"][2], value, rtol=1e-4)


def test_finetune_router_of_refactored_model(source, result, tmp_path):
    split = write_random(source / "model", tmp_path / "split", subs=2)
    out = tmp_path / "tuned"
    summary = finetune_router(
        split,
        str(source / "train.txt"),
        out,
        held_out_text=str(source / "held_out.txt"),
        **OPTIONS | {"k_start": 1, "k_end": 4, "k_stages": 3},
    )
    assert summary["k_values"] == [1, 2, 4]
    parent, before = result[0]["held_out_before"], summary["held_out_before"]
    for k in (1, 2):  # untrained, every 2 of 16 sub-experts are an expert of 8
        assert before[2 * k] == pytest.approx(parent[k], rel=1e-5)
    assert summary["held_out_after"][4] < 0.98 * summary["held_out_before"][4]
    reader = open_checkpoint(out)
    assert reader.config.moe.sub_experts == 2
    assert reader.manifest["refactor"]["fine_tuned"]["k_end"] == 4
    assert reader.manifest["content_sha256"] == content_sha256(reader)
    weight_ED = reader.dense(0)["router.weight"]
    assert weight_ED.shape == (16, 24)
    assert np.abs(weight_ED[::2] - weight_ED[1::2]).max() > 0  # copies parted
    records = "experts/layer_000.bin"
    assert (out / records).samefile(split / records)  # not copied


def test_finetune_router_few_steps_train_k_end(source, tmp_path):
    # One step, although the settings ask for two K.
    summary = finetune_tiny(source, tmp_path / "out", tokens=64)
    assert (summary["steps"], summary["k_values"]) == (1, [2])
    assert [*summary["held_out_after"]] == [2]
    fine_tuned = open_checkpoint(tmp_path / "out").manifest["fine_tuned"]
    assert (fine_tuned["k_start"], fine_tuned["k_end"]) == (2, 2)


def test_finetune_router_proxy_gate_is_refused(source, tmp_path):
    split = write_random(source / "model", tmp_path / "split", "proxy_global", subs=2)
    with pytest.raises(ConfigError, match="gate is proxy_global"):
        finetune_router(split, str(source / "train.txt"), tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_end": 9}, "1..8, got 9"),
        ({"k_start": 0}, "1..8, got 0"),
        ({"k_start": 2, "k_end": 1}, "k_start 2 exceeds k_end 1"),
        ({"tokens": 0}, "tokens must be a positive whole number, got 0"),
        ({"learning_rate": -1.0}, "learning_rate must be positive, got -1.0"),
        ({"batch_tokens": 40}, "batch_tokens 40 must be a multiple of .* 16"),
        ({"momentum": 1}, "no option 'momentum'; known: tokens, .*accumulate"),
        ({"decay": 2.0}, "decay must lie in 0..1"),
    ],
)
def test_finetune_router_bad_settings_are_refused(source, tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        finetune_tiny(source, tmp_path / "out", **change)
    assert list(tmp_path.iterdir()) == []


def test_finetune_router_bad_text_is_refused(source, tmp_path):
    for text, message in (
        ("", "is empty"),
        ("The river", r"has \d+ tokens, expected more than the window of 16"),
    ):
        (tmp_path / "text.txt").write_text(text)
        with pytest.raises(RequestError, match=message):
            finetune_router(
                source / "model",
                str(tmp_path / "text.txt"),
                tmp_path / "out",
                **OPTIONS,
            )
    with pytest.raises(CapacityError, match="256 tokens exceeds .* context of 128"):
        finetune_tiny(source, tmp_path / "out", window=256, batch_tokens=512)
    (tmp_path / "out").write_text("")
    with pytest.raises(OutputError, match="is a file"):
        finetune_tiny(source, tmp_path / "out")

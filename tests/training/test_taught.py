"""Fine-tuning on tasks: a folder that says what it is, a run that goes on exactly."""

import json
import os
import shutil
import signal

import jax
import numpy as np
import pytest

from moe_edge.bench.engines import Bench
from moe_edge.convert.hf_config import FINE_TUNED
from moe_edge.convert.open import DEFAULT_MODEL, open_checkpoint
from moe_edge.core.checks import CheckpointError, ConfigError, OutputError
from moe_edge.training import loop, step, tasks, taught
from moe_edge.training.data import Batch
from moe_edge.training.default_config import default_config
from moe_edge.training.evaluation import right_answers, round_to_bfloat16
from moe_edge.training.start import init_params, stored_params
from moe_edge.training.untrained import START, Sizes, write_untrained
from tests.support.tiny_checkpoints import hf_folder
from tests.training.conftest import make_train_step

SIZES = {"num_layers": 1, "num_experts": 4, "top_k": 2, "expert_dim": 16}
TINY = Sizes(96, shared_dim=16, **SIZES)
SHORT = {"tokens": 3 * 512, "batch_tokens": 512, "length": 64, "mix": "words=1"}
SHORT |= {"long_length": 128}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Random weights with the default model's tokenizer."""
    folder = tmp_path_factory.mktemp("tiny") / "hf"
    write_untrained(folder, TINY)
    return folder


def flags(settings: dict) -> list[str]:
    return [f"--{name}={value}" for name, value in settings.items()]


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_to_the_same_weights(
    tiny, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(loop, "make_train_step", make_train_step)
    monkeypatch.setattr(taught, "HELD_OUT", 16)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    given = [*flags(SHORT), "--checkpoint", str(tiny)]
    taught.main([str(whole), *given])
    assert f"Right answers: words 0.000: {whole}" in capsys.readouterr().out

    drawn = tasks.TaskRows.next_batch

    def stopping(self, *args):
        if self.position == 8:  # the second step's
            os.kill(os.getpid(), signal.SIGTERM)
        return drawn(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(tasks.TaskRows, "next_batch", stopping)
        taught.main([str(parts), *given])
    assert not parts.exists() and capsys.readouterr().out == ""
    work = tmp_path / "parts.training"
    assert json.loads((work / "status.json").read_text())["step"] == 2
    with pytest.raises(SystemExit, match="is not of this run: seed is 1, it was 0"):
        taught.main([str(parts), *given, "--seed", "1"])
    taught.main([str(parts), *given])
    assert not work.exists()
    name = "model.safetensors"
    assert (parts / name).read_bytes() == (whole / name).read_bytes()
    assert (parts / name).read_bytes() != (tiny / name).read_bytes()

    said = json.loads((whole / "config.json").read_text())[FINE_TUNED]
    assert said == f"{tiny} model, on its generators' tasks: 0.00 M tokens, seed 0"
    assert (parts / "config.json").read_text() == (whole / "config.json").read_text()
    assert said in (whole / "README.md").read_text()
    records = (whole / "metrics.jsonl").read_text().splitlines()
    assert set(json.loads(records[-1])["held_out"]) == {"words"}
    with Bench(whole) as bench:
        assert bench.model["weights"] == f"fine-tuned: {said}" and not bench.is_random


def test_stored_weights_are_those_that_were_written(tiny):
    reader = open_checkpoint(tiny, np.dtype(np.float32))
    stored = stored_params(reader)
    fresh = round_to_bfloat16(init_params(reader.config, 0, START))
    assert stored.keys() == fresh.keys()
    for name, array in fresh.items():
        assert stored[name].dtype == np.float32
        np.testing.assert_array_equal(stored[name], array, err_msg=name)


CONFIG = default_config(
    50, d_model=32, expert_dim=8, num_layers=1, num_experts=4, top_k=2
)


@pytest.mark.slow
def test_targets_without_weight_are_not_learnt():
    hyper = step.Hyper(balance=0.0)
    rows = np.random.default_rng(0).integers(0, 50, (2, 17)).astype(np.int32)
    other = rows.copy()
    other[:, -1] = (other[:, -1] + 1) % 50  # targets only: no input
    weights = np.zeros((2, 16), np.float32)
    weights[:, 3:6] = 1
    run_step = make_train_step(CONFIG, hyper)
    found = []
    for given in ((rows, weights), (other, weights), (rows, None), (other, None)):
        params = init_params(CONFIG, 0)
        state = step.TrainState(params, step.make_optimizer(hyper).init(params))
        state, metrics = run_step(state, given[0], np.float32(1e-2), given[1])
        found.append((float(metrics["loss"]), np.asarray(state.params["head"])))
    assert found[0][0] == found[1][0] != found[2][0] != found[3][0]
    np.testing.assert_array_equal(found[0][1], found[1][1])
    assert (found[2][1] != found[3][1]).any()


def test_mean_loss_of_some_targets_is_theirs():
    params, forward = init_params(CONFIG, 0), step.forward_fn(CONFIG)
    rows = np.random.default_rng(0).integers(0, 50, (2, 9)).astype(np.int32)
    weights = np.zeros((2, 8), np.float32)
    weights[0, 2], weights[1, 7] = 0.25, 0.75

    @jax.jit
    def losses(params, rows, weights):
        some, _ = step.mean_loss(forward, params, rows, weights)
        each = step.token_losses(forward(params, rows[:, :-1])[0], rows[:, 1:])
        return some, step.mean_loss(forward, params, rows)[0], each

    some, every, each_BS = losses(params, rows, weights)
    np.testing.assert_allclose(every, each_BS.mean(), rtol=1e-6)
    expected = 0.25 * each_BS[0, 2] + 0.75 * each_BS[1, 7]
    np.testing.assert_allclose(some, expected, rtol=1e-5)
    assert losses(params, rows, np.zeros_like(weights))[0] == 0


def test_an_answer_is_right_if_all_its_tokens_would_be_chosen():
    params = init_params(CONFIG, 0)
    rows = np.random.default_rng(0).integers(0, 50, (4, 9)).astype(np.int32)
    forward = jax.jit(step.forward_fn(CONFIG))
    best = np.asarray(forward(round_to_bfloat16(params), rows[:, :-1])[0]).argmax(-1)
    rows[:, -1] = best[:, -1]  # a target only: no input
    rows[3, -1] = (best[3, -1] + 1) % 50
    weights = np.zeros((4, 8), np.float32)
    weights[:, -1] = 1
    weights[1, 3] = 1
    assert best[1, 3] != rows[1, 4]  # a second token of its answer, which is wrong
    evaluate = right_answers(CONFIG, {"a": Batch(rows, weights)}, rows=2)
    assert evaluate(params) == {"a": 0.5}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mix": "storis=1"}, "unknown task family 'storis'"),
        ({"tokens": 10**10}, "tokens is 10000000000, expected at most 1000000000"),
        ({"tokens": 0}, "tokens must be a positive whole number, got 0"),
        ({"length": 300}, "sequence length 300 must divide 512"),
        ({"long_length": 300}, "sequence length 300 must divide 512"),
        ({"length": 32}, "length is 32, expected 64 or more: a shorter row ends"),
        ({"batch_tokens": 100}, "batch_tokens 100 must be a multiple of 512"),
        ({"learning_rate": -1.0}, "learning_rate must be positive, got -1.0"),
        ({"seed": -1}, "seed is -1, expected 0 or more, of 63 bits at most"),
        ({"checkpoint": "no-such-folder"}, "no-such-folder is not a folder"),
    ],
)
def test_settings_that_cannot_be_taught_are_refused_in_a_line(given, message, tmp_path):
    with pytest.raises(SystemExit, match=message) as refused:
        taught.main([str(tmp_path / "o"), *flags(given)])
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_another_kind_is_refused(tiny, tmp_path):
    other = hf_folder(tmp_path / "olmoe", "olmoe")
    with pytest.raises(ConfigError, match="a olmoe model cannot be written, expected"):
        taught.open_teachable(other, 64)
    bare = shutil.copytree(tiny, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="bare has no tokenizer.json"):
        taught.open_teachable(bare, 64)
    for path in bare.glob("*token*.json"):
        path.unlink()
    text = (tiny / "tokenizer.json").read_text()
    (bare / "tokenizer.json").write_text(text.replace("<|endoftext|>", "<|end|>"))
    with pytest.raises(ConfigError, match=r"gives <\|endoftext\|> the id None, exp"):
        taught.open_teachable(bare, 64)
    (bare / "tokenizer.json").write_text(text[:100])
    with pytest.raises(CheckpointError, match="cannot read tokenizer .*bare"):
        taught.open_teachable(bare, 64)
    with pytest.raises(
        ConfigError, match="rows have 2048 tokens, expected at most 1024"
    ):
        taught.open_teachable(tiny, 2048)


def test_folders_that_are_not_ours_are_kept(tiny, tmp_path):
    teaching = taught.Teaching(**SHORT)
    out, work = tmp_path / "out", tmp_path / "out.training"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="is not empty"):
        taught.teach(out, teaching, checkpoint=tiny)
    with pytest.raises(OutputError, match="holds none of"):
        taught.teach(out, teaching, checkpoint=tiny, overwrite=True)
    with pytest.raises(OutputError, match="overlaps the source"):
        taught.teach(tiny / "inside", teaching, checkpoint=tiny)
    shutil.rmtree(out)
    work.mkdir()
    (work / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="out.training is not of this run: tokens is"):
        taught.teach(out, teaching, checkpoint=tiny)
    assert [path.name for path in work.iterdir()] == ["notes.txt"]


def test_a_dry_run_writes_nothing(tiny, tmp_path, capsys):
    given = [*flags(SHORT), "--checkpoint", str(tiny), "--dry_run"]
    taught.main([str(tmp_path / "o"), *given])
    assert not list(tmp_path.iterdir()) and capsys.readouterr().out == ""


def test_the_default_model_can_be_taught():
    reader, tokenizer = taught.open_teachable("default", 256)
    assert reader.path == DEFAULT_MODEL
    assert tokenizer.get_vocab_size() == reader.config.vocab_size

"""A tiny run from nothing to a Hugging Face folder; resumption; bad settings."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import ConfigError
from moe_edge.training import export, run, step
from moe_edge.training import text as text_module
from moe_edge.training.default_config import default_config

TINY = {
    "data_dir": "no-such-folder",
    "train_tokens": 6144,
    "decay_tokens": 2048,
    "warmup_tokens": 1024,
    "batch_tokens": 1024,
    "vocab_size": 400,
    "d_model": 32,
    "num_layers": 2,
    "num_experts": 4,
    "top_k": 2,
    "expert_dim": 8,
    "shared_dim": 16,
    "task_characters": 4000,
}


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    """A run of 3 steps, resumed to 6."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "_STDLIB_BYTES", 30_000)
        patch.setattr(run, "EVAL_ROWS", 2)
        first = run.run_pretrain(str(folder), **TINY | {"train_tokens": 3072})
        second = run.run_pretrain(str(folder), **TINY)
    return folder, first, second


def test_run_pretrain_resumes_where_it_stopped(tiny_run):
    folder, first, second = tiny_run
    assert (first["step"], second["step"]) == (3, 6)
    rows = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    held_out = [row for row in rows if "held_out" in row]
    assert [row["tokens"] for row in held_out] == [3072, 6144]
    assert set(held_out[0]["held_out"]) == {
        "code",
        *("arithmetic", "words", "stories", "tables"),
    }
    assert json.loads((folder / "status.json").read_text())["finished"]


def test_run_pretrain_rejects_other_architecture(tiny_run):
    folder, _, _ = tiny_run
    with pytest.raises(ConfigError, match="is of another architecture"):
        run.run_pretrain(str(folder), **TINY | {"num_layers": 1})


def test_export_hf_reads_back_as_bfloat16_of_the_parameters(tiny_run, tmp_path):
    folder, _, _ = tiny_run
    params, progress, config = export.read_newest(folder)
    assert progress.step == 6
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    out = tmp_path / "hf"
    export.export_hf(params, config, tokenizer, out, extra_files={"README.md": "card"})
    read = open_checkpoint(out)
    assert (out / "README.md").read_text() == "card"
    assert read.config.moe == config.moe
    want = np.asarray(params["experts.1"]).astype(export.BFLOAT16)
    np.testing.assert_array_equal(read.experts(1), want)
    want = np.asarray(params["blocks.0.attn.k"]).astype(export.BFLOAT16)
    np.testing.assert_array_equal(read.dense_layer(0)["attn.k"], want)


def test_read_newest_rejects_folder_without_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match="no training checkpoint in"):
        export.read_newest(tmp_path)


def test_train_step_learns_one_batch():
    config = default_config(
        50,
        d_model=32,
        num_layers=1,
        num_experts=4,
        top_k=2,
        expert_dim=8,
        shared_dim=16,
    )
    params = step.init_params(config, 0)
    hyper = step.Hyper()
    state = step.TrainState(params, step.make_optimizer(hyper).init(params))
    run_step = step.make_train_step(config, hyper)
    rows = np.random.default_rng(0).integers(0, 50, (2, 17)).astype(np.int32)
    losses = []
    for _ in range(30):
        state, metrics = run_step(state, rows, np.float32(1e-2))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.6 * losses[0]
    assert int(metrics["counts_LE"].sum()) == 2 * 16 * 2


def test_balance_loss_of_even_routing_is_one_and_of_one_expert_is_num_experts():
    even = step.balance_loss(jnp.array([5, 5]), jnp.full((4, 2), 0.5))
    np.testing.assert_allclose(even, 1.0)
    single = step.balance_loss(jnp.array([8, 0]), jax.nn.one_hot(jnp.zeros(4, int), 2))
    np.testing.assert_allclose(single, 2.0)


def test_router_information_of_even_scores_is_zero_and_of_one_expert_is_log():
    even, single = jnp.full((3, 4), 0.25), jax.nn.one_hot(jnp.zeros(3, int), 4)
    np.testing.assert_allclose(step.router_information(even), 0.0, atol=1e-6)
    np.testing.assert_allclose(step.router_information(single), np.log(4), rtol=1e-6)

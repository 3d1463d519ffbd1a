"""A tiny run from nothing to a Hugging Face folder; resumption; bad settings."""

import contextlib
import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import ConfigError, OutputError
from moe_edge.training import checkpoints, export, run, step
from moe_edge.training import text as text_module
from moe_edge.training.default_config import default_config
from moe_edge.training.start import init_params
from tests.training.conftest import TINY, make_train_step


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 1}, "is of another architecture"),
        ({"vocab_size": 500}, "--vocab_size is 500, it was 400"),
        ({"seed": 1}, "--seed is 1, it was 0"),
        ({"task_characters": 5000}, "--task_characters is 5000, it was 4000"),
        ({"data_dir": "."}, "--data_dir is .*, it was None"),
        ({"balance": 0.5}, "balance is 0.5, it was 0.01; name them again"),
        ({"embedding_std": 0.5}, "embedding_std is 0.5, it was 1.0; name them again"),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_run_pretrain_refused_resume_changes_nothing(
    tiny_run, change, message, dry_run
):
    folder, _, _ = tiny_run
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    options = TINY | {"learning_rate": 1e-4, "dry_run": dry_run} | change
    with pytest.raises(ConfigError, match=message):
        run.run_pretrain(str(folder), **options, config_text=lambda: "new")
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before


def test_run_pretrain_does_not_go_on_with_a_loss_that_is_gone(tiny_run, tmp_path):
    folder = shutil.copytree(tiny_run[0], tmp_path / "old")
    settings = json.loads((folder / "settings.json").read_text())
    for evenness, refused in ((0.0, False), (1.5, True)):
        old = json.dumps(settings | {"evenness": evenness})
        (folder / "settings.json").write_text(old)
        context = contextlib.nullcontext()
        if refused:
            context = pytest.raises(
                ConfigError, match="evenness 1.5, which is no longer"
            )
        with context:
            run.run_pretrain(str(folder), **TINY, dry_run=True)


def test_run_pretrain_dry_run_of_a_resume_writes_nothing(tiny_run):
    folder, _, _ = tiny_run
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    assert run.run_pretrain(str(folder), **TINY, dry_run=True)["dry_run"]
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before
    assert (folder / "config.gin").read_text() == "run = 2"


def test_run_pretrain_rejects_corpus_of_unknown_origin(tmp_path):
    (tmp_path / "corpus.npz").write_bytes(b"")
    with pytest.raises(ConfigError, match="delete .*corpus.npz and it is built again"):
        run.run_pretrain(str(tmp_path), **TINY, dry_run=True)


def test_run_pretrain_dry_run_names_missing_text_and_bad_out_dir(tmp_path):
    (tmp_path / "file").write_text("")
    options = TINY | {"dry_run": True}
    with pytest.raises(OutputError, match="file is a file"):
        run.run_pretrain(str(tmp_path / "file"), **options)
    with pytest.raises(ConfigError, match=f"training text {tmp_path}.* is missing or"):
        run.run_pretrain(str(tmp_path / "new"), **options | {"data_dir": str(tmp_path)})
    assert not (tmp_path / "new").exists()


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


@pytest.mark.parametrize(
    "change, message",
    [
        ({"learning_rate": -1.0}, r"learning_rate must be positive, got -1\.0"),
        ({"expert_rate_factor": 0.0}, r"expert_rate_factor must be positive, got 0\.0"),
        ({"embedding_std": float("inf")}, "embedding_std must be finite, got inf"),
        ({"expert_scale": -2.0}, r"expert_scale must be positive, got -2\.0"),
        ({"max_minutes": float("nan")}, "max_minutes must be 0 or more .* got nan"),
        (
            {"checkpoint_minutes": -1.0},
            "checkpoint_minutes must be 0 or more .* got -1",
        ),
        (
            {"vocab_size": 10**9},
            "vocab_size is 1000000000, expected at most 65536: the",
        ),
        ({"balance": -0.5}, r"balance must be 0 or more .* got -0\.5"),
        ({"balance": float("nan")}, "balance must be 0 or more .* got nan"),
        (
            {"norm_topk": True, "top_k": 1},
            "norm_topk with top_k 1 makes every weight 1",
        ),
    ],
)
def test_run_pretrain_rejects_settings_that_cannot_train(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        run.run_pretrain(str(tmp_path / "new"), **TINY | change)
    assert not (tmp_path / "new").exists()


def test_run_pretrain_hands_its_settings_to_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "_STDLIB_BYTES", 30_000)
    given = {}

    def train(config, corpus, folder, **settings):
        given.update(settings, config=config)
        return checkpoints.Progress()

    monkeypatch.setattr("moe_edge.training.loop.train", train)
    own = {"balance": 0.5, "expert_rate_factor": 7.0}
    start = {"embedding_std": 0.5, "expert_scale": 2.5}
    run.run_pretrain(str(tmp_path), **TINY, **own, **start, norm_topk=True)
    assert given["config"].moe.norm_topk
    assert {name: getattr(given["hyper"], name) for name in own} == own
    assert dataclasses.asdict(given["start"].args[-1]) == start
    stored = json.loads((tmp_path / "settings.json").read_text())
    assert {name: stored[name] for name in own | start} == own | start


CONFIG = default_config(
    50, d_model=32, num_layers=1, num_experts=4, top_k=2, expert_dim=8, shared_dim=16
)


def begin(params=None, **hyper):
    """(state, compiled step) of CONFIG, from `params` or fresh ones."""
    params = init_params(CONFIG, 0) if params is None else params
    hyper = step.Hyper(**hyper)
    state = step.TrainState(params, step.make_optimizer(hyper).init(params))
    return state, make_train_step(CONFIG, hyper)


def test_train_step_learns_one_batch():
    state, run_step = begin(expert_rate_factor=1.0)
    rows = np.random.default_rng(0).integers(0, 50, (2, 17)).astype(np.int32)
    losses = []
    for _ in range(30):
        state, metrics = run_step(state, rows, np.float32(1e-2))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.6 * losses[0]
    assert int(metrics["counts_LE"].sum()) == 2 * 16 * 2


def test_train_step_moves_experts_by_their_own_rate():
    rows = np.random.default_rng(0).integers(0, 50, (2, 17)).astype(np.int32)
    moved = {}
    for rate in (1.0, 4.0):
        state, run_step = begin(expert_rate_factor=rate)
        before = {name: np.array(value) for name, value in state.params.items()}
        state, _ = run_step(state, rows, np.float32(1e-2))
        moved[rate] = {n: np.asarray(state.params[n]) - before[n] for n in before}
    for name, change in moved[1.0].items():
        factor = 4.0 if name == "experts.0" else 1.0
        assert np.abs(change).max() > 0, name
        np.testing.assert_allclose(moved[4.0][name], factor * change, atol=1e-6)


def test_balance_loss_of_even_routing_is_one_and_of_one_expert_is_num_experts():
    even = step.balance_loss(jnp.array([5, 5]), jnp.full((4, 2), 0.5))
    np.testing.assert_allclose(even, 1.0)
    single = step.balance_loss(jnp.array([8, 0]), jax.nn.one_hot(jnp.zeros(4, int), 2))
    np.testing.assert_allclose(single, 2.0)

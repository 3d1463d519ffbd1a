"""Input is checked before anything runs, and bad weights are named."""

import shutil

import numpy as np
import pytest

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import (
    CapacityError,
    CheckpointError,
    ConfigError,
    OutputError,
    RequestError,
)
from moe_edge.profile.activations import MAX_FLOAT16, LayerPrograms
from moe_edge.profile.run_profile import run_profile
from moe_edge.profile.writer import work_folder
from tests.support.profiles import profile, write_zoo, zoo_folder


def test_bad_input_is_refused_and_leaves_nothing(tiny, two, tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    out = tmp_path / "p"
    for given, error, words in (
        ({"text": "nowhere.txt"}, ConfigError, "nowhere.txt"),
        ({"text": str(tmp_path / "empty.txt")}, RequestError, "is empty"),
        ({"window": 129}, CapacityError, "context of 128"),
        ({"batch_size": 0}, ConfigError, "batch_size"),
        ({"tokens": -4}, ConfigError, "tokens"),
        ({"max_tokens_per_expert": 1 << 30}, ConfigError, "exceeds"),
        ({"checkpoint": tmp_path}, CheckpointError, "holds neither"),
        ({"tokens": 40, "probes": 1}, ConfigError, "64 tokens or more, the text has"),
    ):
        with pytest.raises(error, match=words):
            profile(out, **({"checkpoint": tiny, "text": two} | given))
    assert not out.exists() and not work_folder(out).exists()
    summary = run_profile(
        out_dir=str(out), checkpoint=str(tiny), text=two, dry_run=True
    )
    assert summary["dry_run"] and not out.exists()


@pytest.mark.slow
def test_used_out_dir_needs_overwrite(tiny, two, tmp_path):
    out = tmp_path / "p"
    first = profile(out, tiny, two)
    with pytest.raises(OutputError, match="--overwrite"):
        profile(out, tiny, two)
    assert profile(out, tiny, two, seed=1, overwrite=True).info["seeds"] == [1]
    assert first.path == out
    out.with_name("q").mkdir()
    (out.with_name("q") / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="no earlier result"):
        profile(tmp_path / "q", tiny, two, overwrite=True)


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory):
    return zoo_folder(tmp_path_factory.mktemp("olmoe") / "m", "olmoe")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        # An expert of the first layer: not the first one that sees what it made.
        ("layers.0.mlp.experts.2.up_proj", np.nan, "layer 0, expert 2: activations"),
        ("layers.0.mlp.experts.2.gate_proj", 3e38, "layer 0, expert 2: activations"),
        ("layers.0.mlp.experts.2.down_proj", np.inf, r"layer 0, after its .*\b2\b"),
        ("layers.0.self_attn.o_proj", np.inf, "layer 0: hidden states"),
        ("embed_tokens", np.nan, "embeddings are not finite"),
    ],
)
def test_weights_that_are_not_finite_are_named(
    olmoe, two, tmp_path, name, value, words
):
    _, tensors, raw = olmoe
    name = f"model.{name}.weight"
    broken = tensors | {name: np.full_like(tensors[name], value)}
    folder = tmp_path / "m"
    shutil.copytree(olmoe[0], folder)
    write_zoo(folder, raw, broken)
    with pytest.raises(CheckpointError, match=words):
        # One row of an expert: others see bad weights as well.
        profile(tmp_path / "p", folder, two, max_tokens_per_expert=1)


def test_infinity_is_refused_and_large_numbers_are_counted(olmoe):
    programs = LayerPrograms(open_checkpoint(olmoe[0]))
    programs.load(1)
    x_TD = np.random.default_rng(0).standard_normal((3, programs.config.d_model))
    small_TF, clipped = programs.neurons(2, x_TD.astype(np.float32))
    assert clipped == 0 and np.abs(small_TF).max() < 100
    scale_T1 = np.array([[1.0], [3000.0], [1.0]])
    large_TF, clipped = programs.neurons(2, (x_TD * scale_T1).astype(np.float32))
    beyond_TF = np.abs(large_TF) == MAX_FLOAT16
    assert 0 < clipped == beyond_TF.sum() == beyond_TF[1].sum()
    np.testing.assert_array_equal(large_TF[::2], small_TF[::2])
    with pytest.raises(CheckpointError, match="layer 1, expert 2.*not finite"):
        programs.neurons(2, (x_TD * 1e30).astype(np.float32))

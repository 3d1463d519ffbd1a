"""What a refactoring refuses before it works, and how it runs beside another."""

import numpy as np
import pytest

from moe_edge.core.checks import CheckpointError, ConfigError, OutputError
from moe_edge.core.files import locked_folder
from moe_edge.profile.run_profile import run_profile
from moe_edge.refactor.partition_model import MIN_TOKENS, PartitionOptions
from moe_edge.refactor.refactor_settings import Settings
from moe_edge.refactor.run_refactor import run_refactor
from tests.support.tiny_checkpoint import TEXT, write_tiny_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = np.random.default_rng(0).permutation((12 * TEXT).split())
    path.write_text(" ".join(words))
    return str(path)


@pytest.fixture(scope="module")
def profile(tiny, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("profile") / "p"
    run_profile(out_dir=str(out), text=text, checkpoint=str(tiny), window=64)
    return str(out)


def refactor(tiny, profile, out, **options):
    arguments = {"checkpoint": str(tiny), "profile": profile, "ppl_k": ""} | options
    return run_refactor(out_dir=str(out), **arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sub_experts": 5}, ConfigError, "not split into 5.*divisors are 1, 2, 4, 8"),
        ({"sub_experts": 1}, ConfigError, "sub_experts must be a whole number from 2"),
        ({"inactive": 4}, ConfigError, r"inactive is 4, expected 1..3"),
        ({"gate": "mlp"}, ConfigError, "unknown gate 'mlp'; known: cg, lg, lg_ft"),
        ({"gate": "lg_ft"}, ConfigError, "no --train_text; a model with --gate lg_ft"),
        (
            {"gate": "cg", "gate_neurons": 5},
            ConfigError,
            r"gate_neurons must be in 1..4",
        ),
        ({"solver": "best"}, ConfigError, "unknown solver 'best'"),
        ({"importance": "size"}, ConfigError, "unknown importance rule 'size'"),
        ({"ppl_k": "4,x"}, ConfigError, "ppl_k is '4,x', expected `all` or 4,8,12"),
        ({"ppl_k": "0,33"}, ConfigError, r"ppl_k 0 is outside of 1..32"),
        ({"ppl_k": "9", "gate": "cg"}, ConfigError, r"ppl_k 9 is outside of 1..8"),
        ({"train_text": "x"}, ConfigError, "--train_text is for --gate lg_ft"),
        ({"activations": "m.npy"}, ConfigError, "--checkpoint means nothing beside"),
        ({"profile": ""}, ConfigError, "no --profile; a model with --gate lg needs"),
        ({"heldout_ratio": 1.0}, ConfigError, "heldout_ratio is 1.0, expected 0 to"),
        ({"min_tokens": 0}, ConfigError, "min_tokens must be positive"),
        ({"profile": "/nowhere"}, CheckpointError, "holds no profile.json"),
    ],
)
def test_bad_input(options, error, message, tiny, profile, tmp_path):
    with pytest.raises(error, match=message):
        refactor(tiny, out=tmp_path / "r", **{"profile": profile} | options)
    assert not list(tmp_path.iterdir())


def test_profile_of_another_checkpoint_is_refused(profile, tmp_path):
    other = write_tiny_checkpoint(tmp_path / "other", rms_norm_eps=1e-6)
    path = other / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-4:] = np.float32(0.5).tobytes()
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is of checkpoint .* with content"):
        refactor(other, profile, tmp_path / "r")


def test_second_run_into_the_same_folder_is_refused(tiny, profile, tmp_path, capsys):
    out, work = tmp_path / "r", tmp_path / "r.partition"
    with locked_folder(work, "r"):
        with pytest.raises(OutputError, match="another run is writing .*/r; wait for"):
            refactor(tiny, profile, out)
        assert work.is_dir() and not out.exists()
    refactor(tiny, profile, out)
    assert out.is_dir() and not work.exists()
    assert "partition: layer 1 (2/2)" in capsys.readouterr().err


def test_settings_and_partition_agree_on_few_tokens():
    defaults = PartitionOptions(subs=4, inactive=3).min_tokens, Settings().min_tokens
    assert defaults == (MIN_TOKENS, MIN_TOKENS)
    assert run_refactor.__kwdefaults__["min_tokens"] == MIN_TOKENS

"""Random weights of the default model's kind: a folder that says what it is."""

import json

import pytest

from moe_edge.bench.engines import Bench
from moe_edge.convert.convert import convert_checkpoint
from moe_edge.convert.hf_config import random_seed
from moe_edge.convert.open import DEFAULT_MODEL, open_checkpoint
from moe_edge.core.checks import ConfigError, OutputError
from moe_edge.training.untrained import Sizes, main, write_untrained

SIZES = {"d_model": 96, "num_layers": 2, "num_experts": 4, "top_k": 2}
SIZES |= {"expert_dim": 8, "shared_dim": 8}
TINY = Sizes(**SIZES)


def weights_in(folder):
    return (folder / "model.safetensors").read_bytes()


def test_a_folder_has_sizes_tokenizer_and_seed_of_the_command(tmp_path, capsys):
    folder = tmp_path / "untrained"
    flags = [f"--{name}={value}" for name, value in SIZES.items()]
    main([str(folder), *flags, "--seed", "3"])
    assert capsys.readouterr().out == f"Random weights, seed 3: {folder}\n"
    with Bench(folder) as bench:
        config = bench.config
        assert (config.d_model, config.num_layers) == (96, 2)
        moe = config.moe
        assert (moe.num_experts, moe.top_k, moe.expert_dim) == (4, 2, 8)
        told = {"weights": "random, seed 3", "width": 96, "experts": 4, "neurons": 8}
        assert bench.model.items() >= told.items() and bench.is_random
        assert bench.tokenizer.decode(bench.tokenizer.encode("A mill.")) == "A mill."
    with Bench("default") as bench:
        assert bench.model["weights"] == "toy trained here" and not bench.is_random
    name = "tokenizer.json"
    ours, its = (json.loads((at / name).read_text()) for at in (folder, DEFAULT_MODEL))
    assert ours == its


def test_a_seed_gives_the_same_weights_again_and_another_other_ones(tmp_path):
    for name, seed in (("a", 0), ("again", 0), ("other", 1)):
        write_untrained(tmp_path / name, TINY, seed)
    found = [weights_in(tmp_path / name) for name in ("a", "again", "other")]
    assert found[0] == found[1] != found[2]
    write_untrained(tmp_path / "a", TINY, 1, overwrite=True)
    assert weights_in(tmp_path / "a") == found[2]


def test_a_converted_folder_still_says_that_nothing_has_trained_it(tmp_path):
    write_untrained(tmp_path / "hf", TINY, 7)
    convert_checkpoint(tmp_path / "hf", tmp_path / "ours", progress=False)
    assert random_seed(open_checkpoint(tmp_path / "ours").config) == 7


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--d_model", "100"], "d_model is 100, expected a multiple of 96"),
        (["--top_k", "9", "--num_experts", "8"], "top_k must be in 1..num_experts=8"),
        (["--num_layers", "0"], "num_layers must be a positive whole number, got 0"),
        (["--seed", "-1"], "seed is -1, expected 0 or more, of 64 bits at most"),
        (["--seed", str(2**63)], "seed is 9223372036854775808, expected 0 or more"),
    ],
)
def test_sizes_that_no_model_has_are_refused_in_a_line(flags, message, tmp_path):
    with pytest.raises(SystemExit, match=message) as refused:
        main([str(tmp_path / "o"), *flags])
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "o").exists()


def test_a_folder_that_is_there_is_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="overwrite"):
        write_untrained(tmp_path, TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(ConfigError, match="multiple of 96"):
        Sizes(d_model=1000)

"""The command `plan`: last line, files, exit codes."""

import json

import pytest

OLMOE = {"model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024}
OLMOE |= {"max_position_embeddings": 4096, "num_attention_heads": 16}
OLMOE |= {"num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16}
OLMOE |= {"num_key_value_heads": 16, "torch_dtype": "bfloat16", "vocab_size": 50304}
KEYS = "feasible chosen predicted measured error chosen_was_best alternatives refused"
KEYS += " assumptions sources search_s replays out_dir"


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "OLMoE.json"
    path.write_text(json.dumps(OLMOE))
    return str(path)


def test_plan_without_weights_says_last_what_it_wrote(run_script, config, tmp_path):
    flags = ["--config_json", config, "--machine", "rtx_4090"]
    flags += ["--device_memory", "6GiB", "--out_dir", "o"]
    done = run_script("plan", *flags)
    assert {*KEYS.split()} <= done.summary.keys()
    assert done.stdout.startswith("chosen: {'device_memory': '6GiB'}; ")
    out = tmp_path / "o"
    assert json.loads((out / "plan.json").read_text()) == done.summary
    assert "offload.device_memory = '6GiB'" in (out / "plan.gin").read_text()
    assert "bytes are exact" in (out / "README.md").read_text()


def test_plan_that_meets_no_target_exits_3_and_is_written(run_script, config, tmp_path):
    flags = ["--config_json", config, "--machine", "rtx_4090", "--tpot_ms", 0.01]
    done = run_script("plan", *flags, "--device_memory", "6GiB", "--out_dir", "o")
    assert done.code == 3 and "no configuration meets the targets" in done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert not summary["feasible"] and summary["out_dir"] == "o"
    assert "comes nearest" in (tmp_path / "o" / "README.md").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max_ppl_ratio", "0.5"], "max_ppl_ratio is 0.5, expected a number from 1"),
        (["--fixed", "mode=fused"], "mode fused is fixed"),
        (["--device_memory", "1B"], "the minimum is 2 slots"),
        (["--machine", "nothing.json"], "nothing.json"),
        (["--trace", "nothing.csv"], "nothing.csv"),
    ],
)
def test_plan_refuses_bad_input_in_one_line(run_script, config, flags, message):
    given = ["--config_json", config, "--machine", "rtx_4090", "--out_dir", "o"]
    given += [] if "--device_memory" in flags else ["--device_memory", "6GiB"]
    assert message in run_script("plan", *given, *flags).error


def test_dry_run_names_what_is_fixed(run_script, tiny):
    flags = ["--checkpoint", tiny, "--device_memory", "50%", "--fixed", "eviction=lfu"]
    assert "128 are 256 tokens a row" in run_script("plan", *flags, "--dry_run").error
    flags += ["--new_tokens", 32, "--prompt_tokens", 64]
    assert run_script("plan", *flags, "--dry_run").summary["fixed"] == ["eviction"]


def test_dry_run_refuses_what_a_plan_without_weights_would(run_script, config):
    flags = ["--config_json", "none.json", "--machine", "rtx_4090", "--dry_run"]
    assert "none.json does not exist" in run_script("plan", *flags).error
    flags = ["--config_json", config, "--machine", "rtx_4090", "--dry_run"]
    assert run_script("plan", *flags).summary["fixed"] == []


def test_plan_gin_is_run_by_generate(run_script, tiny, tmp_path):
    """The file of a plan, of a checkpoint that is here."""
    flags = ["--checkpoint", tiny, "--machine", "rtx_4090", "--device_memory", "50%"]
    flags += ["--prompt_tokens", 8, "--new_tokens", 4, "--out_dir", "o"]
    run_script("plan", *flags)
    gin = str(tmp_path / "o" / "plan.gin")
    done = run_script("generate", "--gin_file", gin, "--dry_run")
    assert done.summary["prompts"] == 1

import json

import pytest

from moe_edge.hardware.step_costs import read_step_costs


def test_profile_machine_writes_a_preset(run_script, tmp_path):
    flags = ["--d_model", 256, "--expert_dim", 256, "--most_tokens", 64]
    done = run_script("profile_machine", *flags, "--name", "mine", "--out_dir", "o")
    assert done.summary["memory_bytes_per_s"] > 0
    stored = json.loads((tmp_path / "o" / "machine.json").read_text())
    assert stored["device"]["name"] == "mine"
    assert stored["device"]["flops_per_s"] == done.summary["flops_per_s"]


@pytest.mark.slow
def test_profile_machine_times_the_steps_of_a_checkpoint(run_script, tmp_path, tiny):
    flags = ["--d_model", 256, "--expert_dim", 256, "--most_tokens", 8, "--repeats", 3]
    steps = ["--checkpoint", tiny, "--max_batch", 2]
    done = run_script("profile_machine", *flags, *steps, "--out_dir", "o")
    stored = json.loads((tmp_path / "o" / "machine.json").read_text())["step_costs"]
    assert stored["checkpoint"] == str(tiny) and len(stored["held_out"]) == 20
    assert done.summary["decode_worst_error"] == stored["decode_worst_error"]
    costs = read_step_costs(tmp_path / "o" / "machine.json")
    assert costs.decode_s(2, 2) > 0 and costs.prefill_s(40, 2, (2, 128, 128)) > 0
    assert costs.decode.sizes == [1, 2]


def test_profile_machine_refuses_what_is_no_checkpoint(run_script):
    done = run_script("profile_machine", "--checkpoint", "nowhere", "--out_dir", "o")
    assert "nowhere" in done.error
    done = run_script("profile_machine", "--max_batch", 0, "--out_dir", "o")
    assert "max_batch must be a positive whole number, got 0" in done.error

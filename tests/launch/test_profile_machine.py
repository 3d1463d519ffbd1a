import json


def test_profile_machine_writes_a_preset(run_script, tmp_path):
    flags = ["--d_model", 256, "--expert_dim", 256, "--most_tokens", 64]
    done = run_script("profile_machine", *flags, "--name", "mine", "--out_dir", "o")
    assert done.summary["memory_bytes_per_s"] > 0
    stored = json.loads((tmp_path / "o" / "machine.json").read_text())
    assert stored["device"]["name"] == "mine"
    assert stored["device"]["flops_per_s"] == done.summary["flops_per_s"]

"""launch/place_experts.py as a user runs it."""

import json

import numpy as np


def write_counts(path, zero=False):
    with path.open("w") as file:
        for domain, shift in (("a", 0), ("b", 5)):
            for layer in (0, 7):
                numbers = np.roll(np.arange(1, 17), shift + layer).tolist()
                row = {"model": "m", "domain": domain, "layer": layer, "top_k": 2}
                row |= {"num_experts": 16, "tokens": 68}
                row |= {"counts": [0] * 16 if zero else numbers}
                file.write(json.dumps(row) + "\n")


def test_place_experts_prints_methods_last(run_script, tmp_path):
    write_counts(tmp_path / "counts.jsonl")
    flags = ["--statistics", "counts.jsonl", "--server_domains", "a,b"]
    flags += ["--d_model", 2048, "--expert_dim", 1024]
    done = run_script(
        "place_experts", *flags, "--slots", "20,24", "--out_dir", "o", "--seed", 1
    )
    methods = done.summary["methods"]
    assert methods["optimal"]["gap_pct"] == 0.0
    assert methods["greedy"]["objective"] >= methods["optimal"]["objective"]
    assert "\nobjective    remote share of the calls to experts, summed" in done.stdout
    assert np.load(tmp_path / "o" / "placement_greedy.npy").sum() == 44
    assert "place_experts.slots" in (tmp_path / "o" / "config.gin").read_text()
    again = run_script("place_experts", *flags, "--slots", "20,24", "--out_dir", "o")
    assert "not empty; add --overwrite" in again.error


def test_place_experts_bad_input_ends_in_one_line(run_script, tmp_path):
    write_counts(tmp_path / "counts.jsonl", zero=True)
    flags = ["--statistics", "counts.jsonl", "--server_domains", "a,b"]
    flags += ["--d_model", 2048, "--expert_dim", 1024]
    done = run_script("place_experts", *flags, "--slots", "20,24", "--out_dir", "o")
    assert "counts.jsonl:1: counts sum to 0" in done.error
    write_counts(tmp_path / "counts.jsonl")
    done = run_script("place_experts", *flags, "--slots", "20,2", "--out_dir", "o")
    assert "10 blocks (125829120 bytes) are missing" in done.error

import json

from moe_edge.profile.reader import open_profile
from tests.support.tiny_checkpoint import TEXT


def test_profile_model_writes_a_profile(run_script, tiny, tmp_path):
    (tmp_path / "t.txt").write_text(TEXT)
    (tmp_path / "u.txt").write_text(TEXT[::-1])
    flags = ["--checkpoint", tiny, "--max_tokens_per_expert", 9, "--seed", 3]
    files = "t.txt,web:u.txt"
    done = run_script("profile_model", *flags, "--text", files, "--out_dir", "p")
    found = open_profile(tmp_path / "p")
    assert done.summary == {"tokens": found.info["tokens"], "out_dir": "p"}
    assert found.domains == ("t", "web") and found.info["seeds"] == [3]
    assert found.max_tokens == 9
    lines = (tmp_path / "p" / "counts.jsonl").read_text().splitlines()
    assert set(json.loads(lines[0])) == {
        *("model", "domain", "layer", "num_experts", "top_k", "tokens", "counts")
    }


def test_missing_text_is_one_line(run_script, tiny, tmp_path):
    done = run_script("profile_model", "--checkpoint", tiny, "--text", "x.txt")
    assert "calibration text 'x.txt' is no file" in done.error
    done = run_script("profile_model", "--checkpoint", tiny)
    assert "--text" in done.error

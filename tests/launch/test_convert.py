"""launch/convert.py, and what other scripts say of quantised checkpoints."""

import json

from tests.support.block_formats import whole_blocks_folder
from tests.support.gguf_files import from_hf, tokenizer_metadata, write_gguf
from tests.support.progress_lines import without_progress
from tests.support.tiny_checkpoint import (
    CONFIG,
    TEXT,
    tiny_tensors,
    tiny_tokenizer,
    write_tiny_checkpoint,
)


def test_convert_script_both_ways_prints_the_interface_keys(run_script, tiny, tmp_path):
    summary = run_script("convert", "--src", tiny, "--dst", "ours").summary
    assert {"bytes", "seconds", "peak_rss_bytes"} <= set(summary)
    assert summary["bytes"] == (tiny / "model.safetensors").stat().st_size - header(
        tiny
    )
    assert summary["seconds"] > 0 and summary["peak_rss_bytes"] > 1 << 20
    gin = (tmp_path / "ours" / "config.gin").read_text()
    assert "convert_checkpoint.dst = 'ours'" in gin
    flags = ["--src", "ours", "--out_dir", "back", "--to", "hf"]
    back = run_script("convert", *flags).summary
    assert back["content_sha256"] == summary["content_sha256"]
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tiny / name).read_bytes()


def header(folder) -> int:
    """Bytes before the tensors of a safetensors file."""
    with (folder / "model.safetensors").open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def test_convert_script_bad_input_is_one_line(run_script, tiny, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    error = run_script("convert", "--src", tiny, "--dst", "full").error
    assert "full is not empty; add --overwrite" in error
    assert "no dst given" in run_script("convert", "--src", tiny).error
    two = ["--src", tiny, "--dst", "a", "--out_dir", "b"]
    assert "--out_dir b and --dst a name two folders" in (
        run_script("convert", *two).error
    )
    assert "nowhere is not a folder" in (
        run_script("convert", "--src", "nowhere", "--dst", "x").error
    )


def test_convert_check_prints_and_ends_by_whether_it_loads(run_script, tiny, tmp_path):
    done = run_script("convert", "--src", tiny, "--check")
    assert done.summary["loads"] and done.summary["tokenizer"]
    begin = f"{tiny}: Hugging Face folder of qwen2_moe\n2 layers, 2 with 8 experts,"
    assert done.stdout.startswith(begin)
    write_tiny_checkpoint(tmp_path / "odd", with_tokenizer=False, logit_bonus=2)
    done = run_script("convert", "--src", "odd", "--check")
    assert done.code == 2
    said = json.loads(done.stdout.splitlines()[-1])
    assert not said["loads"] and "logit_bonus=2" in said["reasons"][0]
    (error,) = without_progress(done.stderr).splitlines()
    assert error.startswith("error: odd does not load: config.json of qwen2_moe has")


def test_convert_script_reads_gguf_as_it_reads_the_folder(run_script, tiny, tmp_path):
    said, tensors = from_hf(CONFIG, tiny_tensors())
    said |= tokenizer_metadata(tiny_tokenizer(), "gpt-2", eos_token_id=0)
    file = write_gguf(tmp_path / "x.gguf", said, tensors)
    folder = run_script("convert", "--src", tiny, "--dst", "a").summary
    done = run_script("convert", "--src", "x.gguf", "--dst", "b").summary
    for key in ("content_sha256", "bytes", "tensors"):
        assert done[key] == folder[key]
    prompt = ["--prompt", "The river", "--max_new_tokens", 9]
    flags = [[tiny], ["x.gguf", "--device_memory", "50%"], ["b"]]
    lines = []
    for i, own in enumerate(flags):
        run_script("generate", *prompt, "--out_dir", f"o{i}", "--checkpoint", *own)
        lines.append((tmp_path / f"o{i}" / "generations.jsonl").read_text())
    assert lines[1:] == lines[:-1]
    assert run_script("convert", "--src", "x.gguf", "--check").summary["loads"]
    file.write_bytes(file.read_bytes()[:-100])
    assert run_script("convert", "--src", "x.gguf", "--check").code == 2
    error = run_script("convert", "--src", "x.gguf", "--dst", "c").error
    assert "x.gguf is damaged or truncated: tensor" in error
    assert not (tmp_path / "c").exists()


def test_quantised_experts_through_the_scripts(run_script, tmp_path):
    hf = whole_blocks_folder(tmp_path / "hf")
    flags = "--src", hf, "--dst", "q", "--expert_dtype", "q8_0"
    assert run_script("convert", *flags).summary["expert_dtype"] == "q8_0"
    verified = run_script("convert", "--src", "q", "--verify").summary
    assert verified["verified"]
    (tmp_path / "t.txt").write_text(TEXT * 3)
    text = "--text", tmp_path / "t.txt"
    scored = run_script("evaluate", "--checkpoint", "q", *text).summary
    back = run_script("convert", "--src", "q", "--dst", "back", "--to", "hf")
    assert back.summary["dequantised"] == "q8_0"
    same = run_script("evaluate", "--checkpoint", "back", *text).summary
    source = run_script("evaluate", "--checkpoint", hf, *text).summary
    ours, theirs = scored["perplexity"], same["perplexity"]
    assert abs(ours / theirs - 1) < 1e-4 < abs(ours / source["perplexity"] - 1)
    refused = "q has q8_0 weights, whose neurons cannot be told apart in blocks of 32"
    profile = run_script("profile_model", "--checkpoint", "q", *text, "--out_dir", "p")
    assert refused in profile.error and "profiling takes the" in profile.error
    flags = "--checkpoint", "q", "--profile", "p", "--out_dir", "r"
    refactor = run_script("refactor", *flags)
    assert refused in refactor.error and "refactoring takes the" in refactor.error

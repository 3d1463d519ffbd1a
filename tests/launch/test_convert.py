from tests.support.gguf_files import from_hf, tokenizer_metadata, write_gguf
from tests.support.tiny_checkpoint import CONFIG, tiny_tensors, tiny_tokenizer


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
    file.write_bytes(file.read_bytes()[:-100])
    error = run_script("convert", "--src", "x.gguf", "--dst", "c").error
    assert "x.gguf is damaged or truncated: tensor" in error
    assert not (tmp_path / "c").exists()

import json
import os

import pytest

from moe_edge.core.checks import (
    CapacityError,
    CheckpointError,
    ConfigError,
    OutputError,
)
from moe_edge.engine.run_generate import run_generate
from tests.support.tiny_checkpoint import write_tiny_checkpoint

KEYS = {"tokens_per_s", "ttft_s", "hit_ratio", "bytes_moved", "out_dir"}


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_generate_streams_one_prompt_and_writes_it(run_script, tiny, tmp_path):
    flags = ["--checkpoint", tiny, "--prompt", "The river", "--max_new_tokens", 9]
    done = run_script("generate", *flags, "--out_dir", "o")
    assert set(done.summary) == KEYS
    assert done.summary["tokens_per_s"] > 0
    (line,) = read_lines(tmp_path / "o" / "generations.jsonl")
    assert (line["id"], len(line["tokens"])) == ("prompt/0", 9)
    shown = done.stdout.rsplit("\n", 2)[0]
    assert shown == f"The river{line['text']}"
    told = f"first token after {1e3 * done.summary['ttft_s']:.1f} ms, then "
    told += f"{done.summary['tokens_per_s']:.4g} tokens/s; before that "
    assert told in done.stderr
    assert "generate.max_new_tokens = 9" in (tmp_path / "o" / "config.gin").read_text()


@pytest.mark.slow
def test_generate_as_module_shows_what_the_terminal_can(run_process, tiny, tmp_path):
    flags = ["--checkpoint", tiny, "--prompt", "café", "--max_new_tokens", 5]
    flags += ["--out_dir", "o"]
    done = run_process("generate", *flags, as_module=True, PYTHONIOENCODING="ascii")
    assert done.summary["out_dir"] == "o" and done.stdout.startswith("caf?")
    assert len(read_lines(tmp_path / "o" / "generations.jsonl")) == 1


def test_generate_reads_a_prompt_file(run_script, tiny, tmp_path):
    rows = [
        {"id": f"p/{i}", "prompt": "The mill " * (i + 1), "meta": {}} for i in range(3)
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["--checkpoint", tiny, "--prompts", "p.jsonl", "--max_new_tokens", 5]
    done = run_script("generate", *flags, "--temperature", 0.8)
    assert done.summary["hit_ratio"] is None
    lines = read_lines(tmp_path / done.summary["out_dir"] / "generations.jsonl")
    assert [line["id"] for line in lines] == ["p/0", "p/1", "p/2"]
    assert all(set(line) == {"id", "text", "tokens"} for line in lines)


def test_generate_rejects_prompt_beyond_the_context(tiny, tmp_path):
    with pytest.raises(CapacityError, match="'prompt/0' has .* context of 128"):
        run_generate(out_dir=str(tmp_path / "o"), checkpoint=tiny, prompt=["ab " * 90])
    assert not (tmp_path / "o").exists()


def test_generate_rejects_checkpoint_without_tokenizer(tmp_path):
    bare = write_tiny_checkpoint(tmp_path / "bare", with_tokenizer=False)
    with pytest.raises(CheckpointError, match="bare has no tokenizer.json"):
        run_generate(out_dir=str(tmp_path / "o"), checkpoint=bare, prompt=["a"])


def test_generate_rejects_missing_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="none is not a folder"):
        run_generate(
            out_dir=str(tmp_path / "o"), checkpoint=tmp_path / "none", prompt=["a"]
        )


def test_generate_rejects_full_out_dir_without_overwrite(tiny, tmp_path):
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "keep").write_text("x")
    with pytest.raises(OutputError, match="o is not empty; add --overwrite"):
        run_generate(out_dir=str(tmp_path / "o"), checkpoint=tiny, prompt=["a"])
    assert (tmp_path / "o" / "keep").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_generate_rejects_out_dir_that_cannot_be_written(tiny, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="cannot be written"):
        run_generate(out_dir=str(tmp_path / "o"), checkpoint=tiny, prompt=["a"])


def test_generate_rejects_out_dir_below_a_file(tiny, tmp_path):
    (tmp_path / "f").write_text("x")
    with pytest.raises(OutputError, match="cannot be written"):
        run_generate(out_dir=str(tmp_path / "f" / "o"), checkpoint=tiny, prompt=["a"])


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"max_new_tokens": 0},
            "max_new_tokens must be a positive whole number, got 0",
        ),
        ({"batch_size": 0}, "batch_size must be a positive whole number, got 0"),
        ({"batch_size": 2.5}, "batch_size must be a positive whole number, got 2.5"),
        ({"temperature": -0.5}, "got -0.5"),
        ({"activations": "int8"}, "int8 meet weights in interleaved blocks"),
        ({"kv_cache": "int4"}, "unknown kv_cache 'int4'; known: bfloat16"),
        ({"weights": "moved"}, "unknown weights 'moved'; known: copied, mapped"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
        ({"top_k": -1}, "top_k must be 0 .* got -1"),
    ],
)
def test_generate_rejects_bad_number(tiny, tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        run_generate(
            out_dir=str(tmp_path / "o"), checkpoint=tiny, prompt=["a"], **change
        )

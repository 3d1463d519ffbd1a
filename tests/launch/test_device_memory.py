"""An absolute --device_memory: one minimum for the check, --dry_run and the run."""

import dataclasses
import inspect
import json
import re
import shutil

import numpy as np
import pytest

import moe_edge as me
from moe_edge.configurables import ROOTS, get_root
from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.tokenizer import load_tokenizer
from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.run_generate import run_generate
from moe_edge.evaluate.run import _cache_room, run_evaluate
from tests.support.tiny_checkpoint import TEXT, write_tiny_checkpoint
from tests.support.tiny_models import ALL

LOSSY = OffloadOptions(route="drop", route_options={"threshold": 0.45})
SERVED = ("--max_batch", 2, "--max_context", 64, "--prefill_chunk", 32)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, and what commands read: by name."""
    folder = tmp_path_factory.mktemp("budget")
    (folder / "t.txt").write_text(TEXT)
    row = {"id": "q", "prompt": "How many", "choices": ["12", "three"]}
    (folder / "q.jsonl").write_text(json.dumps(row | {"answer_index": 0}))
    np.save(folder / "t.npy", np.arange(1, 61).reshape(5, 12))
    model = write_tiny_checkpoint(folder / "tiny")
    return {"folder": folder, "model": model}


COMMANDS = {
    "generate": (
        "2 rows of 75 tokens",
        ("--prompt", "ab", "--prompt", "abc", "--max_context", 75),
    ),
    "text": ("8 rows of 32 tokens", ("--text", "t.txt", "--window", 32)),
    "mcq": ("8 rows of 10 tokens", ("--mcq", "q.jsonl")),
    "tokens": ("5 rows of 12 tokens", ("--tokens", "t.npy", "--logits", "l.npz")),
    "serve": (r"\d rows of 64 tokens", ("--port", 0, *SERVED)),
    "load": (
        r"\d rows of 64 tokens",
        ("--target", "engine", "--poisson", 9, "--duration_s", 1, *SERVED),
    ),
}


def test_every_command_with_the_flag_is_tested():
    with_flag = {
        name
        for name in ROOTS
        if "device_memory" in inspect.signature(get_root(name)).parameters
    }
    # lm_eval: tests/parity/test_run_lm_eval.py; plan: test_plan.py
    others = {"lm_eval", "plan"}
    assert with_flag == {"generate", "evaluate", "serve", "load", *others}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_dry_run_names_the_minimum_that_it_accepts(run_script, files, name):
    assumed, flags = COMMANDS[name]
    script = name if name in ("generate", "serve", "load") else "evaluate"
    names = ("t.txt", "q.jsonl", "t.npy", "l.npz")
    flags = [str(files["folder"] / f) if f in names else f for f in flags]
    flags += ["--checkpoint", files["model"], "--dry_run"]
    if script != "serve":
        flags += ["--out_dir", files["folder"] / "out"]
    done = run_script(script, *flags, "--device_memory", "1B")
    found = re.search(rf"KV cache \d+ for {assumed}.* that is (\d+) bytes", done.error)
    assert found, done.error
    least = int(found[1])
    done = run_script(script, *flags, "--device_memory", f"{least - 1}B")
    assert f"that is {least} bytes" in done.error
    done = run_script(script, *flags, "--device_memory", f"{least}B")
    assert done.summary["dry_run"] is True


def test_an_evaluation_runs_at_the_minimum(files, tmp_path):
    """The default batch of 8 once had no room in any absolute budget."""
    given = {"checkpoint": str(files["model"]), "out_dir": str(tmp_path / "o")}
    given |= {"text": str(files["folder"] / "t.txt"), "window": 32, "overwrite": True}
    with pytest.raises(CapacityError) as refused:
        run_evaluate(**given, device_memory="1B")
    least = re.search(r"that is (\d+) bytes", str(refused.value))[1]
    found = run_evaluate(**given, device_memory=f"{least}B")
    assert found["perplexity"] == run_evaluate(**given)["perplexity"]


@pytest.mark.parametrize("route", [None, LOSSY])
def test_questions_are_answered_at_the_minimum_of_their_tokens(files, tmp_path, route):
    """Not of their bytes: NFKC makes 18 letters of a sign of 3 bytes."""
    model = shutil.copytree(files["model"], tmp_path / "nfkc")
    raw = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(
        json.dumps(raw | {"normalizer": {"type": "NFKC"}})
    )
    tokenizer = load_tokenizer(open_checkpoint(model))
    row = {"id": "q", "prompt": 2 * "\ufdfa", "choices": ["1", "2"], "answer_index": 0}
    (tmp_path / "q.jsonl").write_text(json.dumps(row))
    texts = [f"{row['prompt']} {choice}" for choice in row["choices"]]
    tokens = max(len(tokenizer.encode(text, end=False)) for text in texts)
    assert tokens > 60 > 2 * len(row["prompt"].encode()) + 8
    given = {
        "checkpoint": str(model),
        "out_dir": str(tmp_path / "o"),
        "overwrite": True,
    }
    given |= {"mcq": str(tmp_path / "q.jsonl"), "offload": route}
    with pytest.raises(CapacityError, match=f"8 rows of {tokens} tokens") as refused:
        run_evaluate(**given, device_memory="1B")
    least = re.search(r"that is (\d+) bytes", str(refused.value))[1]
    assert run_evaluate(**given, device_memory=f"{least}B")["n"] == 1


def test_rows_that_do_not_run_together_need_no_cache():
    """A large vocabulary's logits leave fewer rows than the batch; short ones more."""
    config = dataclasses.replace(ALL["gqa"], vocab_size=1 << 18, max_positions=100)
    assert _cache_room(config, [90, 500], 64, False) == {"batch": 1, "capacity": 100}
    assert _cache_room(config, [20] * 9, 64, False) == {"batch": 6, "capacity": 20}
    assert _cache_room(config, [20, 20], 64, True) == {"batch": 64, "capacity": 20}


@pytest.mark.slow
def test_a_size_gives_the_command_the_slots_that_it_gives_python(files, tmp_path):
    """One rule: a size reserves the KV cache of rows of max_context tokens."""
    folder = shutil.copytree(files["model"], tmp_path / "long")
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 2048
    (folder / "config.json").write_text(json.dumps(config))
    model = me.load(folder)
    with pytest.raises(CapacityError, match="1 row of 1024 tokens") as refused:
        model.offload("1B")
    least = int(re.search(r"that is (\d+) bytes", str(refused.value))[1])
    size = f"{least + 2 * model.expert_bytes}B"

    def slots(max_context=None, new=8):
        given = {"checkpoint": str(folder), "out_dir": str(tmp_path / "o")}
        given |= {"max_context": max_context, "max_new_tokens": new, "prompt": ["ab"]}
        run_generate(**given, device_memory=size, overwrite=True)
        return json.loads((tmp_path / "o" / "offload.json").read_text())["slots"]

    def slots_of_python(max_context=None):
        with model.offload(size, max_context=max_context) as engine:
            return engine.core.report()["slots"]

    assert slots() == slots_of_python() == slots_of_python(1024) == slots(1024) == 4
    assert slots(64) == slots_of_python(64) > 4
    # The command knows its prompts, and reserves more where they are longer than that.
    with pytest.raises(CapacityError, match="KV cache .* for 1 row of 1202 tokens"):
        slots(new=1200)
    with pytest.raises(CapacityError, match="are up to 66 tokens, more than max_con"):
        slots(32, new=64)
    with pytest.raises(CapacityError, match="max_context of 4096 tokens exceeds the"):
        slots(4096)
    with pytest.raises(ConfigError, match="max_context must be a positive whole"):
        slots(0)

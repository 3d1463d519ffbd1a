"""Beginnings of prompts that outlive their server."""

import numpy as np
import pytest
import safetensors.numpy

from moe_edge.engine import prompt_files
from moe_edge.engine.prompt_files import SUFFIX, PromptFiles
from moe_edge.engine.slots import RowSlots
from tests.support.running import SIZES, engine_of, log_probs_of, row, run, tokens_of

MODEL = {"content": "abc", "top_k": 3}
ROOM = {"prompt_cache_bytes": 1 << 20}


@pytest.fixture(scope="module")
def engine():
    return engine_of("resident", "gqa")


def slots_of(engine, **more):
    return RowSlots(engine, **SIZES, **ROOM | more)


def filled(engine, folder):
    """(slots that ran two long prompts, their folder)."""
    slots = slots_of(engine)
    run(slots, [(0, row("a", 40, 3, k=2)), (0, row("b", 33, 3))])
    assert len(slots.cache) == 2
    assert PromptFiles(folder, MODEL).save(slots) == 2
    return slots


def test_next_server_has_the_bits_and_spares_the_prompt(engine, tmp_path):
    filled(engine, tmp_path)
    again = slots_of(engine)
    assert PromptFiles(tmp_path, MODEL).load(again) == 2
    assert again.cache.num_bytes > 0
    asked = row("c", 40, 6, k=2, top_logprobs=3)
    assert again.cached_tokens(asked.prompt, 2) == 32
    found = run(again, [(0, asked)])
    alone = run(slots_of(engine), [(0, asked)])
    assert tokens_of(found) == tokens_of(alone)
    np.testing.assert_array_equal(log_probs_of(found)["c"], log_probs_of(alone)["c"])
    # Written before, so only dates change.
    assert PromptFiles(tmp_path, MODEL).save(again) == 0


def test_other_models_and_torn_files_are_left_alone(engine, tmp_path):
    filled(engine, tmp_path)
    first, second = sorted(tmp_path.glob(f"*{SUFFIX}"))
    assert PromptFiles(tmp_path, MODEL | {"content": "x"}).load(slots_of(engine)) == 0
    data = first.read_bytes()
    first.write_bytes(data[: len(data) // 2])
    (tmp_path / f"0{SUFFIX}").write_bytes(b"nothing")
    strange = {"k": np.array([3]), "tokens": np.zeros((1, 32), np.int32)}
    safetensors.numpy.save_file(strange, tmp_path / f"2{SUFFIX}")
    second.rename(tmp_path / f"1{SUFFIX}")  # not the name of what it holds
    assert PromptFiles(tmp_path, MODEL).load(slots_of(engine)) == 0
    assert PromptFiles(tmp_path / "absent", MODEL).load(slots_of(engine)) == 0


def test_caches_of_another_shape_are_not_taken(engine, tmp_path):
    slots = filled(engine, tmp_path)
    _, kept = slots.cache.youngest_first()[0]
    layers = {n: dict(cache) for n, cache in enumerate(kept.caches)}
    fresh = slots_of(engine)
    assert not fresh.keep(3, kept.tokens, {0: layers[0]})
    assert not fresh.keep(99, kept.tokens, layers)
    assert not fresh.keep(3, kept.tokens[:-1], layers)
    half = {
        n: {k: np.asarray(a)[..., :2] for k, a in c.items()} for n, c in layers.items()
    }
    assert not fresh.keep(3, kept.tokens, half)
    assert fresh.keep(3, kept.tokens, {n: c for n, c in layers.items()})


def test_folder_is_bounded_and_the_oldest_leave(engine, tmp_path):
    filled(engine, tmp_path)
    few = slots_of(engine)
    run(few, [(0, row("d", 24, 3, k=1))])
    one = max(path.stat().st_size for path in tmp_path.glob(f"*{SUFFIX}"))
    few.cache.budget_bytes = few.cache.num_bytes + one
    PromptFiles(tmp_path, MODEL).save(few)
    left = {path.name for path in tmp_path.glob(f"*{SUFFIX}")}
    assert len(left) == 2  # the new one, and the younger of those before


def test_folder_that_cannot_be_written_is_told(engine, tmp_path, capfd):
    slots = filled(engine, tmp_path / "a")
    (tmp_path / "file").write_text("x")
    assert PromptFiles(tmp_path / "file" / "b", MODEL).save(slots) == 0
    assert "cannot be written" in capfd.readouterr().err
    assert prompt_files.VERSION == 1

"""Suite `serving` on a tiny model: every part gives rows whose sides are comparable."""

import functools
import os
import shutil
import types
from dataclasses import replace

import pytest

from moe_edge.convert.open import DEFAULT_MODEL, open_checkpoint
from moe_edge.convert.tokenizer import load_tokenizer
from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.engine.load import load_engine
from moe_edge.schedule.policy import SCHEDULERS
from moe_edge.studies.speed import serving_guided, serving_loop, serving_steps
from moe_edge.studies.speed.models import olmoe_config, write_random
from moe_edge.studies.speed.serving import (
    ServingSettings,
    serving_models,
    serving_rows,
)
from tests.support.serving import linear_costs

TINY = olmoe_config(1, "float32", experts=8, hidden=64, heads=4) | {
    "vocab_size": 4096,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two sizes of one model: the second stands for the refactored one."""
    folder = tmp_path_factory.mktemp("serving")
    write_random(folder / "model", TINY)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEFAULT_MODEL / name, folder / "model")
    return folder


@pytest.fixture(autouse=True, scope="module")
def one_engine():
    """Both models are one folder: parts share its engine and what that compiled."""
    load = functools.cache(load_engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving_loop, "load_engine", load)
        patch.setattr(serving_steps, "load_engine", load)
        patch.setattr(serving_guided, "load_engine", load)
        yield


def rows_of(folder, *parts, **more):
    given = {
        "parts": parts,
        "repeats": 1,
        "checkpoint": str(folder / "model"),
        "refactored": str(folder / "model"),
        "max_batch": 2,
        "max_context": 64,
        "requests": 6,
        "loop_requests": 4,
        "prompt_tokens": 8,
        "new_tokens": 6,
        "prefix_tokens": 32,
        "goodput_requests": 60,
    }
    return serving_rows(ServingSettings(**given | more), folder)


def test_a_decision_is_timed_under_every_policy(folder):
    rows = rows_of(folder, "pick")
    assert [row["case"].split(", ")[1] for row in rows] == [
        *SCHEDULERS,
    ]
    assert all(row["ours"] > 0 and row["bar"] == 1.0 for row in rows)


def test_steps_and_sampling(folder):
    step, sampling = rows_of(folder, "steps", "sampling")
    assert step["case"] == "step of 2 rows, K 1, 2" and step["bar"] == 0.88
    assert step["peer_name"] == "all at K 4" and step["ratio"] > 0
    assert sampling["case"] == "sampling, 2 rows x 4096, 4 rules"


def test_rows_under_a_grammar_make_as_many_tokens_as_free_ones(folder, monkeypatch):
    served, serve_all = [], serving_guided.serve_all

    def record(driver, asked):
        made = [[] for _ in asked]
        told = [replace(r, ends=t.append) for r, t in zip(asked, made, strict=True)]
        served.append(([each.guide is not None for each in asked], made))
        return serve_all(driver, told)

    monkeypatch.setattr(serving_guided, "serve_all", record)
    (row,) = rows_of(folder, "guided")
    assert row["peer_name"] == "free rows" and row["bar"] == 1.05 and row["ratio"] > 0
    assert {tuple(guided) for guided, _ in served} == {(True,) * 2, (False,) * 2}
    assert all(len(tokens) == 6 for _, made in served for tokens in made)
    tokenizer = load_tokenizer(open_checkpoint(folder / "model"))
    for guided, made in served:
        texts = [tokenizer.decode([new.token for new in tokens]) for tokens in made]
        assert all(text.startswith("[") for text in texts) == guided[0]


def test_policies_serve_the_same_requests(folder, monkeypatch):
    served = []

    def record(driver, asked):
        served.append((driver.loop.policy.name, asked))
        return 1.0

    monkeypatch.setattr(serving_loop, "serve_all", record)
    rows = rows_of(folder, "policies")
    sizes = {
        tuple((each.prompt, each.new_tokens) for each in asked) for _, asked in served
    }
    assert len(sizes) == 1 and len(served) == 14  # seven cases, once to warm up
    floors = {tuple(each.floor for each in asked) for _, asked in served}
    assert sorted(map(sorted, floors)) == [[1, 1, 2, 2, 3, 4], [4] * 6]
    assert [row["peer_name"] for row in rows] == [
        "fifo, original",
        "continuous_one_k, original",
        "fifo",
        "continuous_one_k",
        "the original",
        "continuous_one_k, refactored",
        "continuous_one_k",
    ]
    assert rows[0]["bar"] == pytest.approx(1 / 1.2) and rows[2]["bar"] is None


@pytest.mark.slow
def test_goodput_of_too_few_requests_is_refused(folder, monkeypatch):
    steps = types.SimpleNamespace(costs=linear_costs(1e-6, 1e-9))
    monkeypatch.setattr(serving_loop, "measure_steps", lambda *_, **__: steps)
    with pytest.raises(CapacityError, match="raise goodput_requests"):
        rows_of(folder, "goodput")


@pytest.mark.slow
def test_goodput_loop_and_prefix(folder, monkeypatch):
    steps = types.SimpleNamespace(costs=linear_costs())  # of no fast machine
    monkeypatch.setattr(serving_loop, "measure_steps", lambda *_, **__: steps)
    goodput, original, loop, prefix = rows_of(folder, "goodput", "loop", "prefix")
    rates = goodput["requests_per_s"]
    assert goodput["ours"] == pytest.approx(1e3 / rates["ours"][0])
    assert goodput["ratio"] == pytest.approx(rates["peer"][0] / rates["ours"][0])
    assert original["peer"] == goodput["peer"] and original["bar"] is None
    assert original["ours"] == pytest.approx(1e3 / rates["ours, original"][0])
    assert loop["peer_name"] == "generate by 2" and loop["bar"] == 1.05
    assert prefix["case"] == "prefix of 32 tokens again, TTFT" and prefix["ours"] > 0


@pytest.mark.slow
def test_http_is_held_against_the_loop_and_memory_is_read(folder):
    plain, streamed, memory = rows_of(folder, "http", "memory", memory_requests=20)
    assert plain["case"] == "HTTP, plain, 4 requests of 8 + 6 tokens"
    assert streamed["bar"] == 1.10 and streamed["ratio"] > 0
    assert memory["case"] == "memory, growth from 2 to 20 requests"
    assert memory["after_first"] > 1e7


@pytest.mark.slow
def test_ready_is_timed_with_and_without_compiled_programs(folder, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "kept")
    empty, full = rows_of(folder, "ready")
    assert empty["bar"] == 150.0 and full["bar"] == 30.0
    assert full["ours"] > 0 and empty["ours"] > 0
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "kept"


@pytest.mark.slow
def test_a_refactored_model_is_made_once(folder, tmp_path):
    settings = ServingSettings(checkpoint="default")
    (_, original), (_, made) = serving_models(settings, tmp_path)
    assert open_checkpoint(made).config.moe.sub_experts == 4
    written = (made / "manifest.json").stat().st_mtime_ns
    assert serving_models(settings, tmp_path) == [
        ("default", original),
        ("refactored", made),
    ]
    assert (made / "manifest.json").stat().st_mtime_ns == written


def test_an_unknown_part_is_refused():
    with pytest.raises(ConfigError, match="unknown part 'htp'; did you mean 'http'"):
        ServingSettings(parts=("htp",))

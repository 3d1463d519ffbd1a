"""The benchmark's parts; its figures come from running it, not from tests."""

import numpy as np
import pytest

from launch import benchmark
from moe_edge.core.checks import ConfigError, OutputError
from moe_edge.metrics.schema import validate_entry
from moe_edge.studies.speed import convert, decode, engines, models, timing

TINY = models.olmoe_config(2, "bfloat16", experts=9) | {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 16,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
}


@pytest.fixture
def tiny(tmp_path):
    return models.write_random(tmp_path / "tiny", TINY)


def test_interleave_warms_up_then_takes_turns_at_beginning():
    calls = []
    cases = {name: (lambda n=name: calls.append(n) or 1.0) for name in "ab"}
    figures = timing.interleave(cases, 2)
    assert calls == ["a", "b", "a", "b", "b", "a"]
    assert figures == {"a": [1.0, 1.0], "b": [1.0, 1.0]}


def test_round_ratios_pair_the_rounds():
    assert timing.round_ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]


def test_memory_bandwidth_is_positive():
    rates = timing.memory_bandwidth(num_bytes=1 << 20, repeats=1)
    assert rates["copy"] > 0 and rates["read"] > 0


def test_bytes_per_step_counts_dense_head_and_chosen_experts(tiny):
    engine, _ = decode._load(tiny)
    got = engines.bytes_per_step(engine, np.ones((1, 4), int), steps=3)
    D, V, L, K = 48, 61, 2, 8
    matrices = 4 * D * D + 9 * D  # bfloat16; norms are widened to float32
    dense = L * (2 * matrices + 4 * 4 * D)
    record = engine.weights.experts[0].nbytes / 9
    assert got == dense + 2 * V * D + L * K * record


def test_describe_models_counts_one_and_lists_several(tiny):
    D, F, E, V, L = 48, 16, 9, 61, 2
    # Four projections, two norms and two of queries and keys, a router, experts.
    count = L * (4 * D * D + 4 * D + E * D + 3 * E * D * F) + 2 * V * D + D
    one = benchmark.describe_models([("a", tiny)])
    assert one == {"name": "a", "params": count, "weights": "random"}
    two = benchmark.describe_models([("a", tiny), ("default", tiny)])
    listed = f"a ({count / 1e6:.1f} M), default ({count / 1e6:.1f} M)"
    assert (two["name"], two["params"]) == (listed, 0)


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["decode", "prefill"])
def test_suites_write_an_entry_and_print_json(suite, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "benchmark_models", lambda folder: [("tiny", tiny)])
    monkeypatch.setattr(decode.peers, "load_peer", lambda folder: None)
    out = tmp_path / "out"
    summary = benchmark.benchmark(out_dir=str(out), suite=suite, repeats=1)
    assert {row["case"].split("/")[0] for row in summary["rows"]} == {suite}
    assert all(row["ours"] > 0 and row["ratio"] is None for row in summary["rows"])
    validate_entry(out)


@pytest.mark.slow
def test_convert_suite_times_both_ways_beside_a_copy(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "convert_models", lambda folder: [("tiny", tiny)])
    work = tmp_path / "work"
    work.mkdir()
    rows = convert.convert_suite(2, work)
    assert [row["case"] for row in rows] == ["convert/to_ours", "convert/to_hf"]
    for row in rows:
        assert row["bytes"] > 0 and row["peak_rss_bytes"] > row["bytes"]
        assert len(row["runs"]["ours"]) == len(row["runs"]["copy"]) == 2
    assert not any(work.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"suite": "x"}, "unknown suite 'x'; known: convert, decode"),
        ({"repeats": 0}, "repeats must be positive, got 0"),
    ],
)
def test_benchmark_rejects_bad_options(options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        benchmark.benchmark(out_dir=str(tmp_path / "out"), **options)


def test_benchmark_rejects_non_empty_out_dir(tmp_path):
    (tmp_path / "x").write_text("1")
    with pytest.raises(OutputError, match="not empty"):
        benchmark.benchmark(out_dir=str(tmp_path))


def test_script_bad_suite_ends_in_one_line(run_process):
    assert run_process("benchmark", "--suite=nope").error.startswith(
        "error: unknown suite 'nope'"
    )

"""What speed suites share: rows, entries, models; and the suites of a few lines."""

import json
import math
import os

import numpy as np
import pytest

from moe_edge.bench.speed import (
    SuiteSettings,
    answer_of,
    describe_models,
    make_row,
    speed_study,
)
from moe_edge.bench.study import run_study
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.core.process import alone
from moe_edge.engine.generate import Generation
from moe_edge.metrics.schema import validate_entry
from moe_edge.model.quantised import KINDS, format_of
from moe_edge.studies.speed import convert, decode, models

TINY = models.olmoe_config(2, "bfloat16", experts=9, hidden=48, heads=3) | {
    "vocab_size": 61,
    "intermediate_size": 16,
}
ONCE = SuiteSettings(repeats=1)


@pytest.fixture
def tiny(tmp_path):
    return models.write_random(tmp_path / "tiny", TINY)


def test_row_relates_rounds_to_their_peer_and_bar():
    row = make_row("c", [2.0, 6.0, 3.0], "ms", peer=[1.0, 2.0, 3.0], bar=4.0)
    assert (row["ours"], row["peer"], row["ratio"]) == (3.0, 2.0, 2.0)
    assert row["round_ratios"] == [2.0, 3.0, 1.0]
    assert row["limit_fraction"] == 0.5
    alone = make_row("c", [1.0, 2.0, 9.0], "s", limit=4.0)
    assert (alone["ratio"], alone["peer"], alone["limit_fraction"]) == (None, None, 0.5)


def test_answer_counts_bars_and_names_the_range_of_ratios():
    rows = [
        make_row("a", [2.0], "ms", peer=[1.0], peer_name="p", bar=4.0),
        make_row("b", [5.0], "ms", peer=[1.0], peer_name="p", bar=4.0),
        make_row("c", [1.0], "s"),
    ]
    answer = answer_of(rows)
    assert answer == (
        "3 cases; ours / peer is 2.00 to 5.00 in 2, median 3.50; 1 of 2 stay within "
        "their bar."
    )


def test_study_of_a_suite_writes_an_entry(tiny, tmp_path):
    row = make_row("c", [2.0], "ms", peer=[1.0], peer_name="b", bar=1.1, emulated=True)
    row["peer_build"] = "b 1.0: AVX2 = 1"
    study = speed_study("x", "How fast?", lambda *_: [row], lambda *_: [("tiny", tiny)])
    summary = run_study(study, SuiteSettings(), out_dir=str(tmp_path / "out"))
    assert summary["suite"] == "x"
    keys = {"case", "ours", "peer", "unit", "ratio", "limit_fraction"}
    assert set(summary["rows"][0]) == keys
    result = validate_entry(tmp_path / "out")
    assert result["kind"] == "emulated" and result["baselines"] == ["b"]
    assert result["workload"]["peers"] == {"b": "b 1.0: AVX2 = 1"}
    (stored,) = json.loads((tmp_path / "out" / "benchmark.json").read_text())
    assert stored["runs"] == {"ours": [2.0], "peer": [1.0]}


def test_suite_settings_refuse():
    with pytest.raises(ConfigError, match="repeats must be a positive whole number"):
        SuiteSettings(repeats=0)


def test_a_call_in_a_process_of_its_own_gives_its_result_or_its_error():
    assert alone(math.prod, (2, 3)) == 6
    assert alone(os.getpid) != os.getpid()
    with pytest.raises(ZeroDivisionError):
        alone(divmod, 1, 0)
    with pytest.raises(CapacityError, match="process of _exit was killed.*memory"):
        alone(os._exit, 3)


def test_memory_bandwidth_is_positive():
    rates = decode.memory_bandwidth(num_bytes=1 << 20, repeats=1)
    assert rates["copy"] > 0 and rates["read"] > 0


def test_bytes_per_step_counts_dense_head_and_chosen_experts(tiny, monkeypatch):
    timed = [models.BenchmarkModel("tiny", tiny, tiny)]
    monkeypatch.setattr(decode.peers, "load_peers", lambda *given: [])
    ((_, engine, _),) = decode._loaded(timed, None)
    got = decode.bytes_per_step(engine, np.ones((1, 4), int), steps=3)
    D, V, L, K = 48, 61, 2, 8
    matrices = 4 * D * D + 9 * D  # bfloat16; norms are widened to float32
    dense = L * (2 * matrices + 4 * 4 * D)
    record = engine.weights.experts[0].nbytes / 9
    assert got == dense + 2 * V * D + L * K * record


def test_quantised_models_are_of_the_bfloat16_one(tmp_path, monkeypatch):
    small = TINY | {"hidden_size": 96, "intermediate_size": 32}
    monkeypatch.setattr(models, "olmoe_config", lambda _, dtype: small)
    found = {model.name: model for model in models.benchmark_models(tmp_path)[1:]}
    names = *models.DTYPES, "q8_0", "q8_0_int8", "q4_0", "q4_0_int8", "mxfp4"
    assert list(found) == [f"olmoe_450m_{name}" for name in names]
    for kind in KINDS:
        model = found[f"olmoe_450m_{kind}"]
        assert model.hf_folder == found["olmoe_450m_bfloat16"].folder
        reader = open_checkpoint(model.folder)
        assert format_of(reader.layout.kind) == model.kind == kind
        assert model.dense == (None if kind == "mxfp4" else kind)
        assert (reader.dense_kind is None) == (model.dense is None)
    again = models.benchmark_models(tmp_path)  # they are kept
    assert again[1:] == list(found.values())


def test_describe_models_counts_one_and_lists_several(tiny):
    D, F, E, V, L = 48, 16, 9, 61, 2
    # Four projections, two norms and two of queries and keys, a router, experts.
    count = L * (4 * D * D + 4 * D + E * D + 3 * E * D * F) + 2 * V * D + D
    one = describe_models([("a", tiny)])
    assert one == {"name": "a", "params": count, "weights": "random"}
    two = describe_models([("a", tiny), ("default", tiny)])
    listed = f"a ({count / 1e6:.1f} M), default ({count / 1e6:.1f} M)"
    assert (two["name"], two["params"]) == (listed, 0)


def test_decoding_is_timed_as_generate_does_it(monkeypatch):
    def generate(engine, prompts, max_new_tokens):
        assert (engine, prompts, max_new_tokens) == ("engine", [[1, 2], [3, 4]], 11)
        return Generation([[0] * 11] * 2, ttft_s=9.0, decode_s=4.0, steps=10)

    monkeypatch.setattr(decode, "generate", generate)
    assert decode.decode_rate("engine", np.array([[1, 2], [3, 4]]), 10) == 5.0


@pytest.mark.slow
def test_decode_and_prefill_rows(tiny, monkeypatch):
    timed = [models.BenchmarkModel("tiny", tiny, tiny)]
    monkeypatch.setattr(decode, "benchmark_models", lambda folder: timed)
    monkeypatch.setattr(decode.peers, "load_peers", lambda *given: [])
    rows = decode.decode_rows(ONCE, None) + decode.prefill_rows(ONCE, None)
    assert [row["case"] for row in rows] == [
        *("decode/tiny/batch1", "decode/tiny/batch8"),
        *("prefill/tiny/128", "prefill/tiny/512"),
    ]
    assert all(row["ours"] > 0 and row["ratio"] is None for row in rows)
    assert all(0 < row["limit_fraction"] < 1 for row in rows[:2])


@pytest.mark.slow
def test_convert_suite_times_both_ways_against_a_copy(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "convert_models", lambda folder: [("tiny", tiny)])
    work = tmp_path / "work"
    work.mkdir()
    rows = convert.convert_rows(SuiteSettings(repeats=2), work)
    assert [row["case"] for row in rows] == ["convert/to_ours", "convert/to_hf"]
    for row in rows:
        assert row["bytes"] > 0 and row["peak_rss_bytes"] > row["bytes"]
        assert len(row["runs"]["ours"]) == len(row["runs"]["peer"]) == 2
    assert not any(work.iterdir())

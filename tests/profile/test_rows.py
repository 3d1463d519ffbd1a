"""A profile holds what the experts of a model really see, for every family."""

import json

import numpy as np
import pytest

from moe_edge.convert.convert import convert_checkpoint
from moe_edge.engine.load import load_engine
from moe_edge.evaluate.usage import UsageCounter
from moe_edge.profile.counts import sample_tokens
from moe_edge.profile.writer import coactivation_path
from tests.support import numpy_reference
from tests.support.profiles import (
    calibration_of,
    capture,
    numpy_act,
    profile,
    rows_of,
    zoo_folder,
)
from tests.support.tiny_checkpoints import KINDS_OF_EXPERTS


@pytest.mark.parametrize(
    "family",
    [
        # One always, all in CI: each compiles a model of its own. This one has biases,
        # a clamp and windows.
        name if name == "gpt_oss" else pytest.param(name, marks=pytest.mark.slow)
        for name in KINDS_OF_EXPERTS
    ],
)
def test_rows_are_the_activations_of_every_family(family, tmp_path, text):
    dtype = {"mixtral": "bfloat16", "qwen3_moe": "float16"}.get(family, "float32")
    folder, _, _ = zoo_folder(tmp_path / "m", family, torch_dtype=dtype)
    calibration = calibration_of(folder, text)
    reader, seen = capture(folder, calibration)
    config, layout = reader.config, reader.layout
    found = profile(
        *(tmp_path / "p", folder, text),
        max_tokens_per_expert=40,
        hidden=True,
        seed=5,
    )
    assert found.layers == config.moe_layers
    used = 0
    for layer, (hidden, ids, weights) in seen.items():
        records = reader.experts(layer).astype(np.float32)
        for sample in sample_tokens(ids, config.moe.num_experts, 40, 5, layer):
            at = layer, sample.expert
            assert found.tokens_of(*at) == (ids == sample.expert).sum()
            both = [
                hidden[sample.tokens_S] @ layout.part(records[sample.expert], name).T
                for name in ("gate", "up")
            ]
            if layout.has_bias:
                for i, name in enumerate(("gate_bias", "up_bias")):
                    both[i] = both[i] + layout.part(records[sample.expert], name)
            expected = numpy_act(*both, config.moe)
            got = found.activations(*at)
            assert got.dtype == np.float16 and isinstance(got, np.memmap)
            scale = max(1e-3, np.abs(expected).max(initial=0))
            np.testing.assert_allclose(got, expected, atol=3e-3 * scale)
            np.testing.assert_allclose(
                found.gate_weights(*at),
                weights[sample.tokens_S, sample.ranks_S],
                rtol=1e-4,
                atol=1e-6,
            )
            np.testing.assert_array_equal(found.ranks(*at), sample.ranks_S)
            inputs = hidden[sample.tokens_S]
            np.testing.assert_allclose(
                found.hidden(*at), inputs, rtol=2e-3, atol=2e-3 * np.abs(hidden).max()
            )
            used += len(got)
        E = config.moe.num_experts
        chose_TE = (ids[:, :, None] == np.arange(E)).any(axis=1).astype(np.int64)
        both = chose_TE.T @ chose_TE  # tokens that chose both
        stored = np.load(coactivation_path(found.path, layer))
        np.testing.assert_array_equal(stored, both)
        assert np.triu(both, 1).any() and found.info["clipped_activations"] == 0
    assert used > 100


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek", "xverse"])
def test_rows_match_the_numpy_model(family, tmp_path, text, monkeypatch):
    """Against a float64 model that shares no code with ours, hidden states too."""
    changes = {"norm_topk_prob": False, "rms_norm_eps": 1e-6}
    folder, tensors, raw = zoo_folder(tmp_path / "m", family, **changes)
    calibration = calibration_of(folder, text)
    inputs, run = {}, numpy_reference._mlp

    def record(t, p, x):
        inputs.setdefault(p, []).append(x[0])
        return run(t, p, x)

    monkeypatch.setattr(numpy_reference, "_mlp", record)
    for row in rows_of(calibration):
        numpy_reference.logits(tensors, raw, row)
    found = profile(tmp_path / "p", folder, text)
    compared = 0
    for layer in found.layers:
        for expert in range(found.num_experts):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}."
            x = np.array(inputs.get(prefix, np.zeros((0, 48))))
            gate = x @ tensors[prefix + "gate_proj.weight"].astype(float).T
            up = x @ tensors[prefix + "up_proj.weight"].astype(float).T
            expected = gate / (1 + np.exp(-gate)) * up
            got = found.activations(layer, expert).astype(float)
            assert got.shape == expected.shape
            far = np.abs(got[:, None] - expected[None]).max(axis=2)  # order is random
            if len(got):
                assert far.min(axis=0).max() < 3e-3 * max(1, np.abs(expected).max())
                assert len(set(far.argmin(axis=1))) == len(got)
            compared += len(got)
    assert compared == found.info["tokens"] * found.top_k * len(found.layers)


@pytest.mark.slow
def test_counts_are_those_of_the_engine(tiny, two, tmp_path):
    found = profile(tmp_path / "p", tiny, two)
    calibration = calibration_of(tiny, two)
    engine = load_engine(tiny, with_tokenizer=False).engine
    for d, domain in enumerate(("a", "web")):
        counter = UsageCounter(engine.config)
        rows = rows_of(calibration, d)
        for row in rows:  # one shape
            list(engine.score([row], counter))
        np.testing.assert_array_equal(found.counts_NLE[d], counter.counts_LE)
        text = (found.path / "counts.jsonl").read_text().splitlines()
        lines = [row for row in map(json.loads, text) if row["domain"] == domain]
        assert [row["layer"] for row in lines] == [0, 1]
        assert lines[0]["tokens"] == sum(map(len, rows))
    assert found.domains == ("a", "web") and found.info["tokens_per_expert"]["min"] >= 0


@pytest.mark.slow
def test_batch_size_and_format_change_only_rounding(tiny, two, tmp_path):
    convert_checkpoint(src=str(tiny), dst=str(tmp_path / "ours"))
    profiles = [
        profile(tmp_path / f"p{size}", source, two, batch_size=size)
        for size, source in ((1, tiny), (5, tmp_path / "ours"))
    ]
    np.testing.assert_array_equal(profiles[0].counts_NLE, profiles[1].counts_NLE)
    profiles[0].check(profiles[1].content_sha256)
    for layer in profiles[0].layers:
        for expert in range(profiles[0].num_experts):
            ranks = [p.ranks(layer, expert) for p in profiles]
            np.testing.assert_array_equal(*ranks)
            rows = [p.activations(layer, expert) for p in profiles]
            np.testing.assert_allclose(*rows, rtol=2e-3, atol=1e-4)

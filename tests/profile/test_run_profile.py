"""A profile holds what the experts of a model really see, for every family."""

from pathlib import Path

import jax.experimental
import numpy as np
import pytest

from moe_edge.convert.convert import convert_checkpoint
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import (
    CapacityError,
    CheckpointError,
    ConfigError,
    OutputError,
    RequestError,
)
from moe_edge.engine.load import load_engine
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import load_weights
from moe_edge.evaluate.usage import UsageCounter
from moe_edge.profile import activations
from moe_edge.profile.calibration import parse_files, read_calibration
from moe_edge.profile.reader import open_profile
from moe_edge.profile.recorder import sample_tokens
from moe_edge.profile.run_profile import run_profile
from moe_edge.profile.writer import ProfileWriter, open_writer, work_folder
from tests.support import numpy_reference
from tests.support.tiny_checkpoint import TEXT, tiny_tokenizer, write_tiny_checkpoint
from tests.support.tiny_checkpoints import FAMILIES, random_tensors, raw_config
from tests.support.tiny_checkpoints import write_folder as write_zoo

WINDOW = 16


def zoo_folder(path, family, **changes):
    raw = raw_config(family, vocab_size=320, **changes)
    tensors = random_tensors(raw, raw["torch_dtype"])
    # Moderate weights: rounding, not chaos, separates two ways of computing.
    small = {
        n: a if a.ndim == 1 else (a.astype(np.float32) * 0.15).astype(a.dtype)
        for n, a in tensors.items()
    }
    write_zoo(path, raw, small)
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    return path, small, raw


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two domains of unequal length."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "a.txt").write_text(TEXT * 2)
    (folder / "b.txt").write_text(TEXT[:90][::-1])
    return f"{folder / 'a.txt'},web:{folder / 'b.txt'}"


def profile(out_dir, checkpoint, text, **given):
    options = {"window": WINDOW, "batch_size": 3} | given
    summary = run_profile(
        out_dir=str(out_dir), checkpoint=str(checkpoint), text=text, **options
    )
    assert set(summary) == {"tokens", "out_dir"}
    return open_profile(out_dir)


def calibration_of(checkpoint, text):
    tokenizer = tiny_tokenizer()

    class Ids:
        def encode(self, text):
            return tokenizer.encode(text).ids

    return read_calibration(parse_files(text), Ids(), WINDOW, None)


def numpy_act(gate, up, moe):
    if moe.activation == "clamped_swiglu":
        gate = np.minimum(gate, moe.swiglu_limit)
        up = np.clip(up, -moe.swiglu_limit, moe.swiglu_limit)
        return (up + 1) * gate / (1 + np.exp(-1.702 * gate))
    assert moe.activation == "silu"
    return gate / (1 + np.exp(-gate)) * up


def capture(checkpoint, calibration):
    """(reader, layer -> (hidden, ids, weights) of all tokens), from an engine."""
    reader = open_checkpoint(checkpoint)
    engine = ResidentEngine(load_weights(reader), expert_method="dense")
    run, calls = engine._run_experts, []

    def record(*arrays):
        calls.append([np.asarray(array) for array in arrays])

    def run_and_record(hidden, ids, weights, records):
        jax.experimental.io_callback(record, None, hidden, ids, weights, ordered=True)
        return run(hidden, ids, weights, records)

    engine._run_experts = run_and_record
    rows = rows_of(calibration)
    chunks = [np.asarray(logits).shape[1] for _, logits in engine.score(rows)]
    assert len(chunks) == 1 and len(calls) == len(reader.config.moe_layers)
    seen = {}
    for layer, (hidden, ids, weights) in zip(
        reader.config.moe_layers, calls, strict=True
    ):
        real = ids[:, 0] < reader.config.moe.num_experts
        seen[layer] = hidden[real], ids[real], weights[real]
    return reader, seen


def rows_of(calibration, domain=None):
    """Token lists of the windows, of all domains or of one."""
    return [
        calibration.tokens_NW[n][valid].tolist()
        for n, valid in enumerate(calibration.valid_NW)
        if domain is None or calibration.domain_N[n] == domain
    ]


@pytest.mark.parametrize(
    "family",
    [
        # One of each kind always, all in CI: each compiles a model of its own.
        name
        if name in ("mixtral", "deepseek", "gpt_oss")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_rows_are_the_activations_of_every_family(family, tmp_path, text):
    dtype = {"mixtral": "bfloat16", "qwen3_moe": "float16"}.get(family, "float32")
    folder, _, _ = zoo_folder(tmp_path / "m", family, torch_dtype=dtype)
    calibration = calibration_of(folder, text)
    reader, seen = capture(folder, calibration)
    config, layout = reader.config, reader.layout
    found = profile(tmp_path / "p", folder, text, max_tokens_per_expert=40, seed=5)
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
            used += len(got)
        assert np.array_equal(
            np.diag(found.coactivation(layer)),
            found.counts_NLE[:, found.layers.index(layer)].sum(axis=0),
        )
    assert used > 100


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
        lines = [row for row in found.counts() if row["domain"] == domain]
        assert [row["layer"] for row in lines] == [0, 1]
        assert lines[0]["tokens"] == sum(map(len, rows))
    assert found.domains == ("a", "web") and found.info["tokens_per_expert"]["min"] >= 0


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


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


def test_killed_run_goes_on_to_the_same_bytes(tiny, two, tmp_path, monkeypatch):
    whole = profile(tmp_path / "whole", tiny, two)
    loads, load = [], activations.LayerPrograms.load
    write = ProfileWriter.write_coactivation

    def count_loads(self, layer):
        loads.append(layer)
        load(self, layer)

    def kill_once(self, layer, both_EE):
        if layer == 1 and "killed" not in loads:
            loads.append("killed")  # states and activations of the layer are there
            raise KeyboardInterrupt
        write(self, layer, both_EE)

    monkeypatch.setattr(activations.LayerPrograms, "load", count_loads)
    monkeypatch.setattr(ProfileWriter, "write_coactivation", kill_once)
    with pytest.raises(KeyboardInterrupt):
        profile(tmp_path / "cut", tiny, two)
    assert not (tmp_path / "cut").exists() and work_folder(tmp_path / "cut").is_dir()
    again = profile(tmp_path / "cut", tiny, two)
    assert loads == [0, 1, "killed", 1]  # layer 0 was not run again
    assert not work_folder(tmp_path / "cut").exists()
    assert contents(again.path) == contents(whole.path)


@pytest.mark.parametrize("change", [{"seed": 9}, {"resume": False}])
def test_other_settings_or_noresume_start_anew(
    tiny, two, tmp_path, monkeypatch, change
):
    def kill(self, layer, report):
        finish(self, layer, report)
        raise KeyboardInterrupt

    finish = ProfileWriter.finish_layer
    with monkeypatch.context() as patch:
        patch.setattr(ProfileWriter, "finish_layer", kill)
        with pytest.raises(KeyboardInterrupt):
            profile(tmp_path / "p", tiny, two)
    found = profile(tmp_path / "p", tiny, two, **change)
    whole = profile(tmp_path / "whole", tiny, two, **change)
    assert contents(found.path) == contents(whole.path)


def test_bad_input_is_refused_and_leaves_nothing(tiny, two, tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    out = tmp_path / "p"
    for given, error, words in (
        ({"text": "nowhere.txt"}, ConfigError, "nowhere.txt"),
        ({"text": str(tmp_path / "empty.txt")}, RequestError, "is empty"),
        ({"window": 129}, CapacityError, "context of 128"),
        ({"batch_size": 0}, ConfigError, "batch_size"),
        ({"tokens": -4}, ConfigError, "tokens"),
        ({"max_tokens_per_expert": 1 << 30}, ConfigError, "exceeds"),
        ({"checkpoint": tmp_path}, CheckpointError, "holds neither"),
    ):
        with pytest.raises(error, match=words):
            profile(out, **({"checkpoint": tiny, "text": two} | given))
    assert not out.exists() and not work_folder(out).exists()
    summary = run_profile(
        out_dir=str(out), checkpoint=str(tiny), text=two, dry_run=True
    )
    assert summary["dry_run"] and not out.exists()


def test_used_out_dir_needs_overwrite(tiny, two, tmp_path):
    out = tmp_path / "p"
    first = profile(out, tiny, two)
    with pytest.raises(OutputError, match="--overwrite"):
        profile(out, tiny, two)
    assert profile(out, tiny, two, seed=1, overwrite=True).info["seeds"] == [1]
    assert first.path == out
    out.with_name("q").mkdir()
    (out.with_name("q") / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="no earlier result"):
        profile(tmp_path / "q", tiny, two, overwrite=True)


def test_second_run_into_the_same_folder_is_refused(tiny, two, tmp_path):
    with (
        open_writer(tmp_path / "p", {}, overwrite=False, resume=True),
        pytest.raises(OutputError, match="another run"),
    ):
        profile(tmp_path / "p", tiny, two)


def test_weights_that_are_not_finite_are_refused(two, tmp_path):
    folder, tensors, raw = zoo_folder(tmp_path / "m", "olmoe")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    tensors[name] = np.full_like(tensors[name], np.nan)
    write_zoo(folder, raw, tensors)
    with pytest.raises(CheckpointError, match="layer 1.*expert 2.*not finite"):
        profile(tmp_path / "p", folder, two)

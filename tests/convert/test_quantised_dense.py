"""Converting to quantised dense weights, and back."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest

from moe_edge.checkpoint.checksums import item_crc32
from moe_edge.convert.convert import verify_checkpoint
from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.requantise import is_encoded
from moe_edge.core.checks import CheckpointError, ConfigError
from moe_edge.engine.load import check_checkpoint, load_engine
from moe_edge.engine.weights import num_bytes, weight_shapes
from moe_edge.kernels import native
from moe_edge.model.quantised import decode
from moe_edge.model.quantising import encode
from moe_edge.model.shapes import layer_shapes
from moe_edge.model.state_config import ConvConfig, DeltaConfig
from tests.support.conversion import convert, load_all
from tests.support.tiny_checkpoints import (
    hf_folder,
    random_tensors,
    raw_config,
    write_folder,
)
from tests.support.tiny_models import STATES, random_prompts, score_all

# qwen2_moe's; rows of two matrices are no whole blocks.
SIZES = {"hidden_size": 96, "moe_intermediate_size": 32}
PRODUCTS = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up")
PRODUCTS += ("shared.gate", "shared.up", "head")
DELTA = DeltaConfig(key_heads=2, value_heads=4, key_dim=20, value_dim=16, kernel=4)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """(HF folder, its conversion, what converting said)."""
    folder = tmp_path_factory.mktemp("quantised")
    sizes = SIZES | {"torch_dtype": "bfloat16", "tie_word_embeddings": False}
    hf = hf_folder(folder / "hf", "qwen2_moe", **sizes)
    options = {"dtype": "q4_0", "expert_dtype": "q8_0"}
    return hf, folder / "q", convert(hf, folder / "q", **options)


def test_matrices_hold_the_encoded_weights_and_all_else_is_as_it_was(converted):
    hf, path, said = converted
    ours, theirs, total = open_checkpoint(path), open_checkpoint(hf), 0
    assert ours.layout.kind == "q8_0x8" and ours.dense_kind == "q4_0+q4_0x8"
    for item in ("top", "head", 0, 1, 2):
        found, kinds = ours.dense(item), ours.dense_kinds(item)
        for name, array in theirs.dense(item).items():
            blocks, kind = found[name], kinds.get(name)
            assert (kind is not None) == (name in PRODUCTS), name
            in_eights = array.shape[0] % 8 == 0
            total += blocks.nbytes
            if kind is None:
                assert blocks.dtype == ml_dtypes.bfloat16
                assert blocks.tobytes() == array.tobytes()
                continue
            assert kind == ("q4_0x8" if in_eights else "q4_0")
            want = encode(kind, array.astype(np.float32))
            np.testing.assert_array_equal(blocks.rows, want)
            assert blocks.shape == array.shape and blocks.kind == kind
            np.testing.assert_array_equal(blocks.decode(), decode(kind, want))
        assert ours.checksums.dense[item] == item_crc32(found)
        dtypes = ours.dense_dtypes(item)
        assert {dtypes[name] for name in kinds} <= {np.dtype(np.float32)}
    assert said["bytes"] == total + 2 * 6 * ours.layout.size
    assert said["dense_dtype"] == "q4_0" and said["expert_dtype"] == "q8_0"
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["dense_dtype"] == "q4_0+q4_0x8" and manifest["format_version"] == 3
    weights = load_engine(path, with_tokenizer=False).engine.weights
    shapes = weight_shapes(ours)
    assert shapes.num_bytes == num_bytes((weights.top, weights.layers))
    assert shapes.top["head"].codes.shape == weights.top["head"].codes.shape


def test_matrices_of_layers_with_states_are_encoded_but_for_rates_and_decays():
    sizes = {"d_model": 64, "other_attention": (ConvConfig(dim=64, kernel=3), DELTA)}
    config = dataclasses.replace(STATES, **sizes)
    shapes = [layer_shapes(config, layer) for layer in range(2)]
    found = [
        {name for name, shape in each.items() if is_encoded(config, name, shape)}
        for each in shapes
    ]
    assert found[0] >= {"attn.in_proj", "attn.out_proj"}
    assert {name for name in found[1] if name.startswith("attn.")} == {
        *("attn.in_qkv", "attn.in_z", "attn.out_proj")
    }
    assert {*shapes[1]} >= {"attn.in_a", "attn.in_b", "attn.conv"}


def test_export_is_what_the_blocks_mean(converted, tmp_path):
    hf, path, said = converted
    back = convert(path, tmp_path / "back", to="hf")
    assert back["dequantised"] == "q8_0" and "dense_dtype" not in back
    assert back["content_sha256"] == said["content_sha256"] == verify_checkpoint(path)
    found, name = load_all(tmp_path / "back"), "model.layers.2.self_attn.q_proj.weight"
    assert found.keys() == load_all(hf).keys()
    want = open_checkpoint(path).dense_layer(2)["attn.q"].decode()
    np.testing.assert_array_equal(found[name], want)
    half = convert(path, tmp_path / "half", to="hf", dtype="bfloat16")
    assert half["content_sha256"] != back["content_sha256"]
    found = load_all(tmp_path / "half")
    assert {array.dtype.name for array in found.values()} == {"bfloat16"}
    assert found[name].tobytes() == want.astype(ml_dtypes.bfloat16).tobytes()
    # Both run alike, within what the order of sums changes.
    prompts = random_prompts(open_checkpoint(path).config, (30, 1))
    engines = [
        load_engine(each, with_tokenizer=False).engine
        for each in (path, tmp_path / "back")
    ]
    for blocks, floats in zip(*(score_all(e, prompts) for e in engines), strict=True):
        assert np.abs(blocks - floats).max() <= 1e-4 * floats.std()


def test_one_flag_quantises_the_experts_too(converted, tmp_path, capsys):
    hf, _, _ = converted
    convert(hf, tmp_path / "ours")
    said = convert(tmp_path / "ours", tmp_path / "q", dtype="q8_0")
    reader = open_checkpoint(tmp_path / "q")
    assert reader.layout.kind == "q8_0x8" and reader.dense_kind == "q8_0+q8_0x8"
    assert said["expert_dtype"] == "q8_0"
    lines = capsys.readouterr().err
    assert "mlp.down, shared.down stay as they are: their rows are no" in lines


def test_a_tied_embedding_is_the_head(tmp_path):
    hf = hf_folder(tmp_path / "hf", "qwen2_moe", vocab_size=104, **SIZES)
    convert(hf, tmp_path / "q", dtype="q8_0")
    reader = open_checkpoint(tmp_path / "q")
    assert reader.config.tie_embeddings
    assert reader.dense_kinds("top")["embed"] == "q8_0x8"
    engine = load_engine(tmp_path / "q", with_tokenizer=False).engine
    found = np.asarray(engine.programs.top.embed(*first_tokens(engine))[0])
    want = reader.top()["embed"].decode()[[3, 5]]
    np.testing.assert_array_equal(found[0], want)


def first_tokens(engine):
    """What the embedding's program takes for tokens 3 and 5."""
    rows = np.array([[3, 5]], np.int32), np.zeros(1, np.int32), np.ones((1, 2), bool)
    return engine.weights.top["embed"], *rows


def test_what_makes_no_sense_is_refused(converted, tmp_path):
    hf, path, _ = converted
    with pytest.raises(ConfigError, match="unknown dtype 'q5_0'.*q4_0, q8_0"):
        convert(hf, tmp_path / "x", dtype="q5_0")
    with pytest.raises(ConfigError, match="unknown dtype 'mxfp4'"):
        convert(hf, tmp_path / "x", dtype="mxfp4")
    with pytest.raises(ConfigError, match="--dtype q4_0 is of our format"):
        convert(hf, tmp_path / "x", dtype="q4_0", to="hf")
    for options in ({"dtype": "q4_0"}, {"dtype": "bfloat16"}, {}):
        with pytest.raises(CheckpointError, match="q has q8_0 weights and is"):
            convert(path, tmp_path / "x", **options)
    with pytest.raises(ConfigError, match="with 20 neurons cannot be q4_0"):
        other = hf_folder(tmp_path / "hf", "qwen2_moe", hidden_size=64)
        convert(other, tmp_path / "x", dtype="q4_0")
    assert not (tmp_path / "x").exists()


def test_rounded_activations_are_refused_where_nothing_rounds(converted, monkeypatch):
    hf, path, _ = converted
    match = "activations int8 meet weights in interleaved blocks, .*hf has none; con"
    with pytest.raises(ConfigError, match=match):
        load_engine(hf, with_tokenizer=False, activations="int8")
    with pytest.raises(ConfigError, match="activations 'int4'.*known: float32, int8"):
        load_engine(path, with_tokenizer=False, activations="int4")
    monkeypatch.setattr(native, "choice", lambda: "xla")
    with pytest.raises(ConfigError, match="int8 are of the host kernels, and XLA"):
        check_checkpoint(path, with_tokenizer=False, activations="int8")


def test_weights_that_blocks_cannot_hold_are_refused(tmp_path):
    raw = raw_config("qwen2_moe", **SIZES)
    for value, match in (
        (np.nan, "layer 2: attn.k has NaN .* q8_0 cannot hold; leave --dtype out"),
        (1e8, "layers.2.self_attn.k_proj.weight has NaN or infinite"),
    ):
        tensors = random_tensors(raw)
        tensors["model.layers.2.self_attn.k_proj.weight"][7, 9] = value
        hf = write_folder(tmp_path / f"hf{value}", raw, tensors)
        with pytest.raises(CheckpointError, match=match):
            convert(hf, tmp_path / "q", dtype="q8_0")
    assert not (tmp_path / "q").exists()


def test_a_manifest_that_does_not_fit_is_refused(converted, tmp_path):
    _, path, _ = converted
    manifest = json.loads((path / "manifest.json").read_text())
    for changed, match in (
        ({"dense_dtype": "q4_0+q5_0"}, r"dense_dtype 'q4_0\+q5_0' in format_vers"),
        (
            {"format_version": 2},
            "dense_dtype 'q4_0.q4_0x8' in format_version 2, expected",
        ),
        ({"format_version": 4}, "format_version 4, this program reads 1, 2, 3"),
    ):
        (tmp_path / "manifest.json").write_text(json.dumps(manifest | changed))
        with pytest.raises(CheckpointError, match=match):
            open_checkpoint(tmp_path)

"""Blocks of a GGUF file become quantised records, byte for byte."""

import ml_dtypes
import numpy as np
import pytest

from moe_edge.convert.gguf_reader import GgufReader
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CheckpointError
from moe_edge.engine.load import load_engine
from moe_edge.engine.weights import load_weights
from moe_edge.model.quantised import IN_EIGHTS, Matrix
from tests.convert.test_gguf import SAYABLE, WIDE, gguf, model
from tests.support.conversion import convert, load_all
from tests.support.slow_cases import slow
from tests.support.tiny_checkpoints import random_tensors, raw_config
from tests.support.tiny_models import random_prompts, score_all

# Family, and width of a delta-net's value heads.
STATES = [("qwen3_5_moe_text", 16), *slow(("qwen3_5_moe_text", 32))]
STATES += slow(("qwen3_next", 32), ("lfm2_moe", 32))


@pytest.mark.parametrize("family", ["mixtral", *slow("gpt_oss")])
@pytest.mark.parametrize("kind", ["Q8_0", *slow("Q4_0"), "MXFP4"])
def test_blocks_are_taken_over(family, kind, tmp_path):
    raw, tensors = model(family, **(WIDE if family == "mixtral" else {}))
    file = gguf(tmp_path / "x.gguf", raw, tensors, kind)
    got = open_checkpoint(file)
    assert got.layout.kind == kind.lower() and got.dtype == np.uint8
    plain = open_checkpoint(file, np.dtype(np.float32))
    assert plain.layout.kind is None
    for layer in got.config.moe_layers:
        records, floats = got.experts(layer), plain.experts(layer)
        for part in got.layout.shapes:
            np.testing.assert_array_equal(
                got.layout.part(records, part), plain.layout.part(floats, part)
            )
        stored = got._file.read_raw(got._experts(layer)["up"].name, 2, 1)
        start = got.layout.offsets["up"]
        np.testing.assert_array_equal(records[2, start : start + stored.size], stored)
    names = {"attn.q", "attn.k", "attn.v"}
    assert got.dense_kinds(1) == dict.fromkeys(names, kind.lower())
    assert got.dense_kind == kind.lower() and plain.dense_kind is None
    for name, array in plain.dense_layer(1).items():  # of mixtral q and k are permuted
        blocks = got.dense_layer(1)[name]
        assert isinstance(blocks, Matrix) == (name in names)
        found = blocks.decode() if name in names else blocks
        np.testing.assert_array_equal(found, array)
    done = convert(file, tmp_path / "ours")
    ours = open_checkpoint(tmp_path / "ours")
    eights = IN_EIGHTS[kind.lower()]
    assert ours.layout.kind == eights
    assert ours.config.hf_config["dtype"] == "float32"
    record = got.layout.interleaved(got.experts(1)[2])
    np.testing.assert_array_equal(ours.experts(1)[2], record)
    for name in names:
        matrix = got.dense_layer(1)[name].interleaved()
        found = ours.dense_layer(1)[name]
        assert found.kind == matrix.kind
        np.testing.assert_array_equal(found.rows, matrix.rows)
    assert ours.manifest["dense_dtype"] == ours.dense_kind
    assert {*ours.dense_kind.split("+")} <= {kind.lower(), eights}
    assert convert(tmp_path / "ours", None, verify=True)["verified"]
    wide = convert(file, tmp_path / "wide", dtype="float32")
    if kind != "MXFP4":  # whose dense weights are bfloat16
        assert wide["content_sha256"] == done["content_sha256"]
    half = convert(file, tmp_path / "half", dtype="bfloat16")
    assert half["bytes"] < wide["bytes"]
    assert open_checkpoint(tmp_path / "half").dtype == ml_dtypes.bfloat16
    back = convert(file, tmp_path / "back", to="hf")
    assert back["dequantised"] == kind.lower()
    assert load_all(tmp_path / "back").keys() == tensors.keys()
    prompts = random_prompts(got.config, (30,))
    paths = (file, tmp_path / "ours")
    engines = [load_engine(path, with_tokenizer=False).engine for path in paths]
    found = [score_all(engine, prompts)[0] for engine in engines]
    (floats,) = score_all(
        load_engine(tmp_path / "wide", with_tokenizer=False).engine, prompts
    )
    for blocks in found:
        assert np.abs(blocks - floats).max() <= 1e-4 * floats.std()


@pytest.mark.parametrize(("family", "value_dim"), STATES)
def test_blocks_of_layers_with_states_mean_what_their_numbers_do(
    family, value_dim, tmp_path
):
    """Columns of Qwen3.5's are moved by head: as blocks where a head is whole ones."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32}
    if family == "lfm2_moe":
        sizes |= SAYABLE[family]
    else:
        sizes |= {"linear_value_head_dim": value_dim, "rms_norm_eps": 1e-6}
    raw = raw_config(family, **sizes)
    file = gguf(tmp_path / "x.gguf", raw, random_tensors(raw), "Q8_0")
    got, plain = open_checkpoint(file), open_checkpoint(file, np.dtype(np.float32))
    names = {
        "lfm2_moe": {"attn.in_proj", "attn.out_proj"},
        "qwen3_next": {"attn.out_proj"},  # others are of two tensors
        "qwen3_5_moe_text": {"attn.in_qkv", "attn.in_z"},
    }[family]
    names |= {"attn.out_proj"} if value_dim == 32 else set()
    assert {n for n in got.dense_kinds(0) if n.startswith("attn.")} == names
    blocks = got.dense_layer(0)
    for name, array in plain.dense_layer(0).items():
        found = blocks[name]
        found = found.decode() if isinstance(found, Matrix) else found
        np.testing.assert_array_equal(found, array, err_msg=name)


@pytest.mark.parametrize("where", ["norm", "head", "scale", "bias"])
def test_what_is_not_finite_is_refused_where_a_file_is_run(
    where, tmp_path, monkeypatch
):
    """Conversion decodes and checks; a file that is run directly is checked, too."""
    raw, tensors = model("gpt_oss")
    file = gguf(tmp_path / "x.gguf", raw, tensors, "Q8_0")
    reader = open_checkpoint(file)
    load_weights(reader, check_finite=True)
    read_experts, top = GgufReader.read_experts, GgufReader.top

    def spoiled(self, layer, first, out_NR):
        read_experts(self, layer, first, out_NR)
        part = {"scale": "up", "bias": "up_bias"}[where]
        start = self.layout.offsets[part]
        bad = np.array([np.inf], np.float16 if where == "scale" else np.float32)
        out_NR[1, start : start + bad.nbytes] = bad.view(np.uint8)

    def spoiled_top(self):
        found = top(self)
        if where == "norm":
            return found | {"final_norm": found["final_norm"] * np.nan}
        head = found["head"]
        head.rows[3, 34:36] = np.array([np.inf], np.float16).view(np.uint8)
        return found

    if where in ("norm", "head"):
        monkeypatch.setattr(GgufReader, "top", spoiled_top)
    else:
        monkeypatch.setattr(GgufReader, "read_experts", spoiled)
    with pytest.raises(CheckpointError, match="has NaN or infinite values; to run it"):
        load_engine(file, with_tokenizer=False)

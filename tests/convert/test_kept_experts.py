"""FP8 and INT4 experts that are taken over as a folder stores them."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CheckpointError, ConfigError
from moe_edge.engine.load import load_engine
from moe_edge.model.quantised import BLOCK_BYTES, SCALE_BYTES, _apart, block_of
from tests.support.conversion import convert, load_all
from tests.support.packed_weights import (
    FORMATS,
    KEPT,
    WIDE,
    pack_quantized,
    packed_folder,
    words,
)
from tests.support.tiny_checkpoints import write_folder

CASES = [(kind, name) for kind, formats in KEPT.items() for name in formats]
EXPERT = "model.layers.{}.mlp.experts.{}.{}_proj.weight"


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def kept(request, tmp_path_factory):
    """(kind, format, HF folder, its tensors, values, conversion, what it said)."""
    (kind, name), at = request.param, tmp_path_factory.mktemp("kept")
    hf, _, stored, wanted = packed_folder(at / "hf", KEPT[kind][name], **WIDE)
    said = convert(hf, at / "ours", expert_dtype=kind)
    return kind, KEPT[kind][name], hf, stored, wanted, at / "ours", said


def wanted_part(wanted, layer, expert, part):
    if (name := EXPERT.format(layer, expert, part)) in wanted:
        return wanted[name]
    base = f"model.layers.{layer}.mlp.experts."
    if part == "down":
        return wanted[base + "down_proj"][expert]
    return np.split(wanted[base + "gate_up_proj"][expert], 2)[part == "up"]


def test_records_mean_the_very_values(kept):
    kind, _, _, _, wanted, path, said = kept
    reader = open_checkpoint(path)
    layer = reader.config.moe_layers[-1]
    assert reader.layout.kind == f"{kind}x8" and said["expert_dtype"] == kind
    for expert, record_R in enumerate(reader.experts(layer)):
        for part in ("gate", "up", "down"):
            got = reader.layout.part(record_R, part)
            np.testing.assert_array_equal(got, wanted_part(wanted, layer, expert, part))


def test_bits_of_codes_and_scales_are_those_of_the_file(kept):
    kind, format, _, stored, _, path, _ = kept
    if format.fused:
        return  # the same codes; their values are compared above
    reader = open_checkpoint(path)
    layer = reader.config.moe_layers[0]
    layout, record_R = reader.layout, reader.experts(layer)[3]
    start, shape = layout.offsets["up"], layout.shapes["up"]
    flat = record_R[start : start + layout.count(shape)]
    rows = _apart(kind, flat.reshape(shape[0] // 8, -1))
    blocks = rows.reshape(shape[0], -1, BLOCK_BYTES[kind])
    scales, codes = np.split(blocks, [SCALE_BYTES[kind]], axis=-1)
    name = EXPERT.format(layer, 3, "up")
    if kind == "fp8":
        expected = stored[name]
        got = codes.reshape(shape).view(ml_dtypes.float8_e4m3fn)
        scale = next(
            stored[name + s] for s in ("_scale_inv", "_scale") if name + s in stored
        )
        scale = scale.astype(np.float32)
    else:
        module = name.removesuffix(".weight")
        expected, scale = (
            stored[module + ".weight_packed"],
            stored[module + ".weight_scale"],
        )
        halves = np.concatenate([codes & 15, codes >> 4], axis=-1)
        got = words(halves.reshape(shape), 4, 1)
    assert got.tobytes() == expected.tobytes()
    down, across = shape[0] // scale.shape[0], blocks.shape[1] // scale.shape[1]
    each = np.repeat(np.repeat(scale, down, 0), max(across, 1), 1)
    assert (
        scales.tobytes() == np.ascontiguousarray(each[:, : blocks.shape[1]]).tobytes()
    )


def test_bytes_are_those_of_records_on_the_disk(kept):
    kind, _, _, _, _, path, said = kept
    reader = open_checkpoint(path)
    D, F = WIDE["hidden_size"], WIDE["moe_intermediate_size"]
    size = -(-3 * D * F // block_of(kind) * BLOCK_BYTES[kind] // 64) * 64
    assert reader.layout.num_bytes(reader.dtype) == size
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["record"]["bytes"] == size and manifest["dtype"] == f"{kind}x8"
    assert "quantization_config" not in manifest["hf_config"]
    experts = len(reader.config.moe_layers) * 6 * size
    tops = [*reader.top().values()]
    tops += [
        a
        for i in range(reader.config.num_layers)
        for a in reader.dense_layer(i).values()
    ]
    assert said["bytes"] == experts + sum(array.nbytes for array in tops)


def test_export_has_the_values_in_float32(kept, tmp_path):
    kind, _, _, _, wanted, path, said = kept
    back = convert(path, tmp_path / "back", to="hf")
    assert back["dequantised"] == kind
    assert back["content_sha256"] == said["content_sha256"]
    tensors = load_all(tmp_path / "back")
    layer = open_checkpoint(path).config.moe_layers[0]
    name = EXPERT.format(layer, 5, "down")
    assert tensors[name].dtype == np.float32
    np.testing.assert_array_equal(tensors[name], wanted_part(wanted, layer, 5, "down"))


@pytest.mark.slow
@pytest.mark.parametrize("kind, name", [("int4", "groups"), ("fp8", "blocks")])
def test_engines_compute_with_the_values(kind, name, tmp_path, shared_programs):
    """Within gate B; an offloaded engine gives the bits of the resident one."""
    hf, *_ = packed_folder(tmp_path / "hf", KEPT[kind][name], **WIDE)
    convert(hf, tmp_path / "kept", expert_dtype=kind)
    convert(tmp_path / "kept", tmp_path / "values", to="hf")
    prompts = [list(range(3, 20)), [5, 9]]
    found = {}
    for which, offload in (("values", None), ("kept", None), ("half", "50%")):
        path = tmp_path / ("values" if which == "values" else "kept")
        loaded = load_engine(path, with_tokenizer=False, offload=offload)
        found[which] = logits_of(loaded.engine, prompts)
    np.testing.assert_array_equal(found["half"], found["kept"])
    spread = found["values"].std()
    assert np.abs(found["kept"] - found["values"]).max() <= 1e-5 * spread
    assert spread > 0.01


def logits_of(engine, prompts):
    """Of the prompts' last tokens and of three steps."""
    session = engine.new_session(len(prompts), 64)
    logits = [engine.prefill(session, prompts)]
    for _ in range(3):
        tokens_B = np.array([1, 2], np.int32)
        logits.append(engine.decode(session, tokens_B, np.ones(2, bool)))
    return np.stack(logits)


def test_what_is_stored_otherwise_is_refused(tmp_path):
    hf, *_ = packed_folder(tmp_path / "fp8", FORMATS["fp8 blocks"])
    with pytest.raises(ConfigError, match="64 width cannot be fp8, .* hold 128 "):
        convert(hf, tmp_path / "x", expert_dtype="fp8")
    with pytest.raises(CheckpointError, match="gate_proj.weight: its codes are"):
        convert(hf, tmp_path / "x", expert_dtype="int4")
    hf, *_ = packed_folder(tmp_path / "wide", FORMATS["fp8 blocks"], **WIDE)
    with pytest.raises(CheckpointError, match="16 columns share a scale, expected a"):
        convert(hf, tmp_path / "x", expert_dtype="fp8")
    for name, reason in {
        "int4": "16 weights share a scale, expected a multiple of 32",
        "int4 zeros": "it has zero points or an order of its own, expected neither",
        "int8 groups": "its codes are whole numbers of 8 bits",
        "gptq": "its codes are none of int4",
    }.items():
        at = tmp_path / name.replace(" ", "_")
        hf, *_ = packed_folder(at, FORMATS[name])
        with pytest.raises(CheckpointError, match=f"never rounded to, but .*{reason}"):
            convert(hf, tmp_path / "x", expert_dtype="int4")
    half = pack_quantized(group=32, dtype=np.float16)
    hf, *_ = packed_folder(tmp_path / "half", half)
    with pytest.raises(CheckpointError, match="scales are float16, expected bfloat16"):
        convert(hf, tmp_path / "x", expert_dtype="int4")
    with pytest.raises(ConfigError, match="--expert_dtype fp8 is of our format"):
        convert(hf, tmp_path / "x", expert_dtype="fp8", to="hf")
    convert(hf, tmp_path / "ours")
    with pytest.raises(CheckpointError, match="it is no Hugging Face folder"):
        convert(tmp_path / "ours", tmp_path / "x", expert_dtype="fp8")


def test_floats_and_nan_among_the_codes_are_refused(tmp_path):
    format = KEPT["fp8"]["blocks"]
    hf, plain, stored, _ = packed_folder(tmp_path / "hf", format, **WIDE)
    raw = plain | {"quantization_config": format.section}
    name = EXPERT.format(1, 2, "up")
    broken = stored[name].copy()
    broken[5, 7] = np.nan
    hf = write_folder(tmp_path / "nan", raw, stored | {name: broken})
    with pytest.raises(CheckpointError, match=f"tensor {name} has NaN among its FP8"):
        convert(hf, tmp_path / "x", expert_dtype="fp8", allow_nonfinite=True)
    floats = {name: stored[name].astype(ml_dtypes.bfloat16)}
    rest = {n: a for n, a in stored.items() if not n.startswith(name)}
    hf = write_folder(tmp_path / "float", raw, rest | floats)
    with pytest.raises(CheckpointError, match=f"{name}: it is bfloat16"):
        convert(hf, tmp_path / "x", expert_dtype="fp8")


def test_dense_weights_may_be_quantised_beside(tmp_path):
    hf, *_ = packed_folder(tmp_path / "hf", KEPT["int4"]["groups"])
    said = convert(hf, tmp_path / "ours", expert_dtype="int4", dtype="q8_0")
    reader = open_checkpoint(tmp_path / "ours")
    assert said["dense_dtype"] == "q8_0" and reader.layout.kind == "int4x8"
    plain = convert(hf, tmp_path / "plain", expert_dtype="int4")
    layer = reader.config.moe_layers[0]
    other = open_checkpoint(tmp_path / "plain")
    np.testing.assert_array_equal(reader.experts(layer), other.experts(layer))
    assert said["bytes"] < plain["bytes"]
    assert dataclasses.replace(reader.config.moe) == other.config.moe

"""Our GGUF reader and writer against the package `gguf`, llama.cpp's own."""

import numpy as np
import pytest

from moe_edge.checkpoint.schema import dense_items
from moe_edge.convert import rules
from moe_edge.convert.families import config_from_hf
from moe_edge.convert.gguf_blocks import KINDS, NAMES, decode
from moe_edge.convert.gguf_families import ARCHITECTURES
from moe_edge.convert.gguf_file import GgufFile
from moe_edge.convert.gguf_k_quants import LAYOUTS
from moe_edge.convert.gguf_names import dense_sources
from moe_edge.convert.gguf_split import open_gguf
from tests.support.gguf_files import encode, random_blocks, write_gguf
from tests.support.gguf_metadata import ARCHS
from tests.support.tiny_checkpoints import FAMILIES, raw_config

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.parity
Type = gguf.GGMLQuantizationType


def test_types_have_the_packages_numbers_and_sizes():
    theirs = {int(kind): kind.name for kind in Type}
    both = NAMES.keys() & theirs.keys()
    assert len(both) > 25
    assert {code: NAMES[code] for code in both} == {code: theirs[code] for code in both}
    for name, kind in KINDS.items():
        assert gguf.GGML_QUANT_SIZES[Type[name]] == (kind.values, kind.size)


@pytest.mark.parametrize("kind", KINDS)
def test_all_codes_decode_as_the_package_decodes_them(kind):
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (500, KINDS[kind].size * 4), np.uint8)
    if kind == "MXFP4":  # the package's powers of two end at 2 ** 127
        raw.reshape(-1, 17)[:, 0] %= 250
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, Type[kind])
        got = decode(kind, raw.reshape(-1)).astype(np.float32)
    np.testing.assert_array_equal(got, expected.reshape(-1))


KNOWN = gguf.MODEL_ARCH_NAMES.values()


@pytest.mark.parametrize(
    "family", [f for f in ARCHS if f in FAMILIES and ARCHS[f] in KNOWN]
)
def test_names_of_tensors_are_those_of_the_packages_table(family):
    config = config_from_hf(raw_config(family))
    arch = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[ARCHS[family]]
    table = gguf.get_tensor_name_map(arch, config.num_layers)
    whole = {f"blk.{layer}.attn_kv_b.weight" for layer in range(config.num_layers)}
    entry = ARCHITECTURES[ARCHS[family]]
    whole |= {*entry.tensors.values()}
    for item in dense_items(config):
        names = rules.dense_names(config, item)
        for name, sources in dense_sources(config, entry, item, whole).items():
            if name == "attn.in_qkvz":
                continue  # the converter cuts it and joins the parts otherwise
            (source,) = sources
            if family.startswith("qwen") and name.startswith("mlp."):
                continue  # the converter writes no dense layers of these
            hf = names[name].replace("_correction_bias", "_correction.bias")
            # As the converter does.
            hf = hf.replace(".dt_bias", ".dt_proj.bias")
            hf += ".bias" * hf.endswith(".expert_bias")
            cut = ("input_linear.weight", "output_linear.weight")
            if hf.endswith((*cut, ".router.scale", ".per_expert_scale")):
                continue  # the converter's own
            if hf.endswith(
                (".sinks", "sink_bias", "layer_scalar")
            ):  # as the converter renames it
                hf += ".weight"
            assert table.get_name(hf, (".weight", ".bias")) == source.name


def test_file_of_the_packages_writer_is_read(tmp_path):
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "olmoe")
    writer.add_context_length(4096)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_expert_weights_norm(True)
    writer.add_token_list(["a", "é"])
    writer.add_token_scores([0.5, -1.0])
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((3, 5, 256), np.float32)
    expected = {}
    for name in KINDS:
        if name in LAYOUTS:  # the package decodes some of them only
            raw = random_blocks(name, weights.shape, rng)
            packed = np.frombuffer(raw, np.uint8).reshape(3, 5, -1)
        else:
            packed = gguf.quants.quantize(weights, Type[name])
        expected[name] = gguf.quants.dequantize(packed, Type[name])
        writer.add_tensor(name, packed, raw_dtype=Type[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(path)
    assert file.metadata["general.architecture"] == "olmoe"
    assert file.metadata["olmoe.context_length"] == 4096
    assert file.metadata["olmoe.attention.layer_norm_rms_epsilon"] == 1e-5
    assert file.metadata["olmoe.expert_weights_norm"] is True
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "é"]
    assert file.metadata["tokenizer.ggml.scores"].tolist() == [0.5, -1.0]
    for name, values in expected.items():
        assert file.tensors[name].shape == weights.shape
        np.testing.assert_array_equal(file.read(name).astype(np.float32), values)
        np.testing.assert_array_equal(
            file.read(name, 1, 1).astype(np.float32), values[1:2]
        )


def test_file_of_our_test_writer_is_read_by_the_package(tmp_path):
    weights = np.random.default_rng(0).standard_normal((4, 32), np.float32)
    kinds = [kind for kind in KINDS if kind not in LAYOUTS]
    tensors = {k: (k, weights.shape, encode(k, weights)) for k in kinds}
    said = {"general.architecture": "olmoe", "a": 0.5, "b": ["x", "ü"], "c": True}
    reader = gguf.GGUFReader(write_gguf(tmp_path / "x.gguf", said, tensors))
    found = {key: field.contents() for key, field in reader.fields.items()}
    assert {key: found[key] for key in said} == said
    for tensor in reader.tensors:
        got = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        raw = np.frombuffer(tensors[tensor.name][2], np.uint8)
        expected = decode(tensor.name, raw).astype(np.float32)
        np.testing.assert_array_equal(got.reshape(-1), expected)


def test_parts_of_the_packages_writer_are_read(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "olmoe", split_max_tensors=2)
    expected = {f"t{i}": np.full((2, 3), i, np.float32) for i in range(5)}
    for name, values in expected.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(tmp_path / "x-00001-of-00003.gguf")
    assert file.metadata["general.architecture"] == "olmoe"
    assert file.tensors.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(file.read(name), values)

"""Sizes beyond 31 and 32 bits, in sparse files and untouched memory."""

import json
import mmap
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from moe_edge.checkpoint.dense import read_item
from moe_edge.checkpoint.experts_file import read_bytes
from moe_edge.checkpoint.manifest import with_kind
from moe_edge.checkpoint.schema import item_shapes
from moe_edge.convert.check import check_checkpoint, summary
from moe_edge.convert.hf_reader import HfReader
from moe_edge.convert.safetensors_reader import SafetensorsFile
from moe_edge.kernels import native
from moe_edge.model.experts import run_experts
from moe_edge.model.record import RecordLayout
from tests.support.conversion import convert
from tests.support.growth import times_longer
from tests.support.host_kernels import needs_kernels
from tests.support.sparse_folder import DEEPSEEK_V3, fp8_tensors, write_sparse
from tests.support.tiny_models import MOE_ONLY

FAR = (1 << 31) - 8, (1 << 32) - 8  # first bytes that end beyond 2^31 and 2^32
VALUES = np.arange(1, 9, dtype=np.float32)


def test_tensors_beyond_two_to_the_31_and_32_are_read(tmp_path):
    path, header, at = tmp_path / "far.safetensors", {}, 0
    for name, begin in zip("ab", FAR, strict=True):
        for tensor, end, kind in (
            (f"skip {name}", begin, "U8"),
            (name, begin + 32, "F32"),
        ):
            shape = [8] if kind == "F32" else [end - at]
            offsets = {"data_offsets": [at, end]}
            header[tensor] = {"dtype": kind, "shape": shape} | offsets
            at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for begin in FAR:
            out.seek(8 + len(text) + begin)
            out.write(VALUES.tobytes())
    file, got = SafetensorsFile(path), np.empty(8, np.float32)
    for name in "ab":
        np.testing.assert_array_equal(file.tensor(name), VALUES)
        file.read_into(name, got)
        np.testing.assert_array_equal(got, VALUES)
    skipped = file.tensor("skip b")
    assert skipped.size > 1 << 30 and skipped[-1] == 0
    with path.open("rb") as opened:  # as records are read
        got = np.empty(16, np.float32)
        read_bytes(opened.fileno(), 8 + len(text) + FAR[1] - 32, got, path)
    np.testing.assert_array_equal(got[8:], VALUES)


@needs_kernels
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="takes 4 GiB of a GPU")
@pytest.mark.parametrize("choice", ["native", "xla"])
def test_experts_of_an_array_beyond_two_to_the_31_numbers(choice, monkeypatch):
    """The last one of many, all others of which are pages that nobody touches."""
    monkeypatch.setattr(native, "choice", lambda: choice)
    layout, moe = RecordLayout.of(MOE_ONLY), MOE_ONLY.moe
    E, R = (1 << 31) // layout.size + 2, layout.size
    memory = mmap.mmap(-1, E * R * 2)
    many_ER = np.frombuffer(memory, np.uint16).reshape(E, R)
    rng = np.random.default_rng(0)
    record_R = rng.standard_normal(R, np.float32).astype(ml_dtypes.bfloat16)
    many_ER[-1] = record_R.view(np.uint16)
    x_TD = rng.standard_normal((1, MOE_ONLY.d_model), np.float32)
    one = np.ones((1, 1), np.float32)

    def run(records_ER, expert):
        step = native.within(
            lambda *given: run_experts(
                *given, layout, activation=moe.activation, swiglu_limit=None
            )
        )
        ids_TK = np.array([[expert]], np.int32)
        return np.asarray(jax.jit(step)(x_TD, ids_TK, one, records_ER))

    records = jax.device_put(many_ER)
    pointer = records.unsafe_buffer_pointer()
    assert pointer == many_ER.ctypes.data  # not copied
    got = run(records, E - 1)
    np.testing.assert_array_equal(got, run(many_ER[-1:].copy(), 0))
    assert got.any() and not run(records, E - 2).any()


@pytest.mark.slow
def test_a_folder_of_671_billion_parameters_opens_and_plans(tmp_path):
    """DeepSeek-V3's names, shapes and dtypes; the time of opening is linear."""
    folders = [
        write_sparse(tmp_path / str(layers), raw, fp8_tensors(raw))
        for layers in (12, 61)
        if (raw := DEEPSEEK_V3 | {"num_hidden_layers": layers})
    ]
    facts = summary(check_checkpoint(folders[1]))
    assert facts["loads"] and facts["checked"] == "names and shapes"
    total = facts["experts_bytes"]["bfloat16"] + facts["dense_bytes"]["bfloat16"]
    assert round(total / 2e9) == 671
    reader = HfReader(folders[1])
    record_1R = np.ones((1, reader.layout.size), reader.dtype)
    reader.read_experts(60, 255, record_1R)
    assert not record_1R.any()
    # Tensors: 13,000 and 90,000, seven times as many.
    assert times_longer(HfReader, *folders) < 20
    # A layer, whatever room all of them need; experts as stored take a byte a weight.
    said = convert(folders[1], tmp_path / "ours", expert_dtype="fp8", max_layers=1)
    assert said["items_left"] == 62
    made = Path(said["work_dir"]) / "made"
    arrays = read_item(made, 0, item_shapes(reader.config, 0))
    shapes = [array.shape for array in arrays.values()]
    assert shapes.count((18432, 7168)) == 2 and shapes.count((7168, 18432)) == 1
    layout = RecordLayout.of(with_kind(reader.config, "fp8x8"))
    assert layout.size == 3 * 7168 * 2048 // 128 * 132

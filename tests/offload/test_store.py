import json

import jax
import ml_dtypes
import numpy as np
import pytest

from moe_edge.convert.convert import convert_checkpoint
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import ConfigError
from moe_edge.engine.weights import to_device
from moe_edge.offload.store import HostStore
from tests.support.old_checkpoints import as_version_1
from tests.support.tiny_checkpoints import hf_folder

DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(scope="module", params=DTYPES)
def folders(request, tmp_path_factory):
    """An HF folder and the same checkpoint in our format."""
    folder = tmp_path_factory.mktemp("store")
    hf = hf_folder(folder / "hf", "qwen2_moe", torch_dtype=request.param)
    convert_checkpoint(hf, folder / "ours", progress=False)
    return hf, folder / "ours"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    hf = hf_folder(folder / "hf", "qwen2_moe")
    convert_checkpoint(hf, folder / "ours", progress=False)
    return hf, folder / "ours"


def check_equals_resident(store, reader):
    """Every record is bit for bit what the resident engine has on the device."""
    for layer in reader.config.moe_layers:
        resident_ER = np.array(to_device(reader.experts(layer)))
        assert store.dtype == resident_ER.dtype
        for expert, expected_R in enumerate(resident_ER):
            record_R = store.record(layer, expert)
            assert record_R.dtype == store.dtype and not record_R.flags.writeable
            np.testing.assert_array_equal(record_R, expected_R)


@pytest.mark.parametrize("memory", ["host", "pinned"])
def test_host_records_equal_the_resident_arrays(folders, memory):
    for folder in folders:
        reader = open_checkpoint(folder)
        store = HostStore(reader, memory)
        check_equals_resident(store, reader)
        assert store.moe_layers == (0, 2) and store.num_experts == 6
        assert store.block_bytes == reader.layout.size * store.dtype.itemsize


def test_mapped_records_are_the_file(plain):
    reader = open_checkpoint(plain[1])
    store = HostStore(reader, "mmap")
    check_equals_resident(store, reader)
    base = store.record(2, 3)
    while base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)


def test_mapped_bfloat16_is_its_bits(tmp_path):
    hf = hf_folder(tmp_path / "hf", "qwen2_moe", torch_dtype="bfloat16")
    convert_checkpoint(hf, tmp_path / "ours", progress=False)
    reader = open_checkpoint(tmp_path / "ours")
    store = HostStore(reader, "mmap")
    # XLA's CPU products would widen bfloat16 beforehand; a GPU's take it as it is.
    on_cpu = jax.default_backend() == "cpu"
    assert store.dtype == (np.uint16 if on_cpu else ml_dtypes.bfloat16)
    check_equals_resident(store, reader)


def test_cast_while_reading(plain):
    for folder in plain:
        reader = open_checkpoint(folder, np.dtype(ml_dtypes.bfloat16))
        check_equals_resident(HostStore(reader), reader)


def test_source_is_pinned_or_the_record(plain):
    reader = open_checkpoint(plain[1])
    host, pinned = HostStore(reader), HostStore(reader, "pinned")
    assert isinstance(host.source(0, 1), np.ndarray)
    source = pinned.source(0, 1)
    assert isinstance(source, jax.Array)
    assert source.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(np.array(source), host.record(0, 1))


def test_sub_experts_are_blocks(plain, tmp_path):
    import shutil

    folder = as_version_1(shutil.copytree(plain[1], tmp_path / "ours"))
    manifest = json.loads((folder / "manifest.json").read_text())
    # Two sub-experts an expert: F = 20 becomes 10, records half as long.
    manifest["U"], manifest["refactor"] = 2, {"gate": "linear"}
    record = manifest["record"]
    record["shapes"] = {"gate": [10, 48], "up": [10, 48], "down": [48, 10]}
    record["bytes"] //= 2
    (folder / "manifest.json").write_text(json.dumps(manifest))
    reader = open_checkpoint(folder)
    for memory in ("host", "mmap"):
        store = HostStore(reader, memory)
        assert (store.num_experts, store.subs) == (12, 2)
        np.testing.assert_array_equal(store.record(2, 11), reader.experts(2)[11])


def test_mmap_rejects_hf_folder(plain):
    with pytest.raises(ConfigError, match=f"{plain[0]} is not in our .* convert"):
        HostStore(open_checkpoint(plain[0]), "mmap")


def test_mmap_rejects_a_cast(plain):
    reader = open_checkpoint(plain[1], np.dtype(ml_dtypes.bfloat16))
    # The --dtype to convert to, not uint16, which its bits are on a CPU.
    with pytest.raises(ConfigError, match="in float32, which .* mapped as bfloat16;"):
        HostStore(reader, "mmap")


def test_mmap_rejects_float16(tmp_path):
    hf = hf_folder(tmp_path / "hf", "qwen2_moe", torch_dtype="float16")
    convert_checkpoint(hf, tmp_path / "ours", progress=False)
    with pytest.raises(ConfigError, match="in float16, which .* mapped as float32"):
        HostStore(open_checkpoint(tmp_path / "ours"), "mmap")


def test_rejects_unknown_memory(plain):
    with pytest.raises(ConfigError, match="unknown expert memory 'tape'; known: host"):
        HostStore(open_checkpoint(plain[1]), "tape")

"""Experts that stay in a checkpoint's files: same bits, no copy, refused elsewhere."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import moe_edge as me
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CheckpointError, ConfigError
from moe_edge.core.process import alone
from moe_edge.engine.load import check_checkpoint, check_weights, load_engine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.weights import load_weights
from tests.support.conversion import convert
from tests.support.our_checkpoints import write_ours
from tests.support.tiny_checkpoints import hf_folder

STATUS, MAPS = Path("/proc/self/status"), Path("/proc/self/maps")
on_linux = pytest.mark.skipif(not STATUS.exists(), reason="Linux says what is mapped")


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Path:
    return write_ours(tmp_path_factory.mktemp("mapped"), "q8_0")


def file_at(address: int) -> str:
    """The file whose mapping holds an address."""
    for line in MAPS.read_text().splitlines():
        first, end = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < end:
            return line.split()[-1]
    return ""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "q8_0"])
def test_mapped_weights_have_the_bits_of_copied_ones(ours, tmp_path, dtype):
    folder = ours
    if dtype != "q8_0":
        hf = hf_folder(tmp_path / "hf", "qwen2_moe", torch_dtype=dtype)
        convert(hf, folder := tmp_path / "ours")
    given = {"with_tokenizer": False}
    copied = load_engine(folder, **given).engine.weights
    mapped = load_engine(folder, weights="mapped", **given).engine.weights
    assert jax.tree.structure(mapped.experts) == jax.tree.structure(copied.experts)
    everything = (copied.experts, copied.layers, copied.top)
    found = (mapped.experts, mapped.layers, mapped.top)
    for want, got in zip(*map(jax.tree.leaves, (everything, found)), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    if MAPS.exists():
        for layer, array in zip(copied.config.moe_layers, leaves(mapped), strict=True):
            at = file_at(array.unsafe_buffer_pointer())
            assert at.endswith(f"layer_{layer:03d}.bin")


def leaves(weights) -> list[jax.Array]:
    return jax.tree.leaves(weights.experts)


def test_a_damaged_record_is_refused_as_a_copied_one_is(tmp_path):
    convert(hf_folder(tmp_path / "hf", "qwen2_moe"), ours := tmp_path / "ours")
    path = ours / "experts" / "layer_002.bin"
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    for weights in ("copied", "mapped"):
        with pytest.raises(CheckpointError, match="layer_002.bin.*damaged"):
            load_engine(ours, with_tokenizer=False, weights=weights)


def test_what_cannot_be_mapped_is_refused(ours, tmp_path, monkeypatch):
    def refused(match, folder=ours, **given):
        for call in (load_engine, check_checkpoint):
            with pytest.raises(ConfigError, match=match):
                call(folder, with_tokenizer=False, **{"weights": "mapped"} | given)

    refused("unknown weights 'moved'; known: copied, mapped", weights="moved")
    refused("parent is not in our format", folder=ours.parent / "parent")
    refused("they are offloaded; leave --weights", offload=OffloadOptions())
    hf = hf_folder(tmp_path / "hf", "qwen2_moe", torch_dtype="float16")
    convert(hf, half := tmp_path / "half")
    refused("float16, which cannot be mapped as float32", folder=half)
    reader, mesh = open_checkpoint(ours), SimpleNamespace(size=2)
    with pytest.raises(ConfigError, match="runs on 2 devices; leave --weights out"):
        check_weights("mapped", reader, None, mesh)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ConfigError, match="this model runs on gpu; leave"):
        check_weights("mapped", reader, None, None)


def test_mapped_experts_outlive_their_folder(ours, tmp_path):
    """As where a conversion replaces it."""
    shutil.copytree(ours, copy := tmp_path / "copy")
    mapped = load_weights(open_checkpoint(copy), mapped=True)
    shutil.rmtree(copy)
    for got, layer in zip(leaves(mapped), mapped.config.moe_layers, strict=True):
        np.testing.assert_array_equal(got, open_checkpoint(ours).experts(layer))


def test_python_maps_what_the_commands_do(ours):
    model = me.load(ours, weights="mapped")
    with model.resident() as engine, me.load(ours).resident() as copied:
        assert engine.generate("Once", 4).tokens == copied.generate("Once", 4).tokens
        if MAPS.exists():
            for array in leaves(engine.core.weights):
                assert file_at(array.unsafe_buffer_pointer()).endswith(".bin")
    for refused, match in (
        (lambda: me.load(ours, weights="moved"), "unknown weights 'moved'; known: cop"),
        (lambda: me.load(ours.parent / "parent", weights="mapped"), "not in our form"),
        (lambda: model.offload("50%"), "they are offloaded; leave --weights out"),
        (lambda: model.offload("auto"), "they are offloaded; leave --weights out"),
        (lambda: me.compare(model), "they are offloaded; leave --weights out"),
        (me.load(ours, weights="mapped", devices=2).resident, "runs on 2 devices"),
    ):
        with pytest.raises(me.ConfigError, match=match):
            refused()


def test_python_opens_no_device_to_check_mapped_weights(tmp_path):
    hf = hf_folder(tmp_path / "hf", "qwen2_moe", torch_dtype="bfloat16")
    convert(hf, folder := tmp_path / "ours")
    code = (
        f"import moe_edge as me; me.load({str(folder)!r}, weights='mapped')\n"
        "from moe_edge.engine.inline import has_started; assert not has_started()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def memory_mb(name: str) -> float:
    return int(re.search(rf"^{name}:\s+(\d+) kB", STATUS.read_text(), re.M)[1]) / 1e3


def grown(folder: Path, mapped: bool) -> dict[str, float]:
    """MB that loading took, at its end of a process's own and at its peak of all."""
    jax.block_until_ready(jax.numpy.ones(3) + 1)
    own, peak = memory_mb("RssAnon"), memory_mb("VmHWM")
    weights = load_weights(open_checkpoint(folder), mapped=mapped)
    found = {"own": memory_mb("RssAnon") - own, "peak": memory_mb("VmHWM") - peak}
    return found | {"weights": weights.num_bytes / 1e6}


@on_linux
@pytest.mark.slow
def test_no_weight_is_in_memory_twice(tmp_path):
    """Not even while it loads; mapped ones take none of the process's own."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 2048}
    hf = hf_folder(tmp_path / "hf", "qwen2_moe", **sizes)
    convert(hf, folder := tmp_path / "ours")
    copied = alone(grown, folder, False)
    assert copied["weights"] > 100
    assert 0.9 < copied["own"] / copied["weights"] < 1.5
    assert copied["peak"] / copied["weights"] < 1.5
    mapped = alone(grown, folder, True)
    assert mapped["own"] / mapped["weights"] < 0.5
    assert mapped["peak"] / mapped["weights"] < 1.5

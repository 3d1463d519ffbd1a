"""GGUF files that the benchmark hands to llama.cpp hold the checkpoint's weights."""

import numpy as np
import pytest

from moe_edge.convert.hf_reader import HfReader
from moe_edge.convert.open import DEFAULT_MODEL
from moe_edge.convert.tensor_source import TensorSource
from moe_edge.studies.speed.llama_cpp import write_gguf
from moe_edge.studies.speed.models import olmoe_config, write_random

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
@pytest.mark.parametrize("model", ["olmoe", "default"])
def test_gguf_file_holds_every_tensor(tmp_path, model, kind):
    import gguf

    folder = DEFAULT_MODEL
    if model == "olmoe":
        given = olmoe_config(2, "float32", experts=9, hidden=128, heads=4)
        folder = write_random(tmp_path / "hf", given | {"vocab_size": 61})
    file = write_gguf(folder, tmp_path / "gguf", kind)
    config = HfReader(folder).config
    source = TensorSource(folder, config, np.dtype(np.float32))
    found = {each.name: each for each in gguf.GGUFReader(file).tensors}
    E, L = config.moe.num_experts, config.num_layers
    # Experts are stacked: three tensors a layer for 3 E.
    assert len(found) == len(source.shapes) - L * 3 * (E - 1)
    named = found[f"blk.{L - 1}.ffn_down_exps.weight"]
    values = gguf.quants.dequantize(named.data, named.tensor_type)
    last = source.read(f"model.layers.{L - 1}.mlp.experts.{E - 1}.down_proj.weight")
    most = {"F32": 0.0, "BF16": 2**-8, "Q8_0": 1 / 127}[kind] * np.abs(last).max()
    assert values.shape == (E, *last.shape)
    np.testing.assert_allclose(values[-1], last, rtol=0, atol=most)
    router = found["blk.0.ffn_gate_inp.weight"]
    np.testing.assert_array_equal(
        router.data, source.read("model.layers.0.mlp.gate.weight")
    )
    assert write_gguf(folder, tmp_path / "gguf", kind) == file  # kept


def test_experts_alone_may_be_quantised(tmp_path):
    import gguf

    file = write_gguf(DEFAULT_MODEL, tmp_path / "gguf", "Q8_0", "BF16")
    types = {e.name: e.tensor_type.name for e in gguf.GGUFReader(file).tensors}
    assert types["blk.0.ffn_down_exps.weight"] == "Q8_0"
    assert types["blk.0.attn_q.weight"] == types["token_embd.weight"] == "BF16"
    assert types["blk.0.ffn_gate_inp.weight"] == "F32"

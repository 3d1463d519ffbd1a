"""Logits of llama.cpp on the same tiny GGUF files (package `llama_cpp`)."""

import numpy as np
import pytest

from moe_edge.convert.open import open_checkpoint
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import load_weights
from tests.support.gguf_files import ARCHS, from_hf, write_gguf
from tests.support.tiny_checkpoints import random_tensors, raw_config
from tests.support.tiny_models import score_all

llama_cpp = pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.parity
# What llama.cpp computes in one way only is set so.
CASES = {
    "olmoe": {"clip_qkv": None},
    "mixtral": {"sliding_window": None},
    "qwen2_moe": {"mlp_only_layers": [], "rope_theta": 1e4},
    "qwen3_moe": {"decoder_sparse_step": 1, "rope_theta": 1e4},
    "deepseek_v2": {"rope_scaling": None, "topk_method": "greedy", "n_group": 1},
    "deepseek_v3": {"n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}
QUANTISED = {"olmoe": {"hidden_size": 64, "intermediate_size": 32}, "gpt_oss": {}}
KINDS = [(family, "F32", 1e-3) for family in CASES]
KINDS += [(f, kind, 1e-2) for f in QUANTISED for kind in ("Q8_0", "Q4_0")]


@pytest.mark.parametrize("family, kind, bar", KINDS)
def test_logits_are_those_of_llama_cpp(family, kind, bar, tmp_path):
    wide = {} if kind == "F32" else QUANTISED[family]
    changes = {"rms_norm_eps": 1e-6} | CASES[family] | wide
    if family == "deepseek_v3":
        changes["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    raw = raw_config(family, **changes)
    tensors = random_tensors(raw)
    for array in tensors.values():  # so that logits are near one
        if array.ndim > 1:
            array /= np.sqrt(array.shape[-1])
    said, written = from_hf(raw, tensors, kind)
    said |= {f"{ARCHS[family]}.vocab_size": 101, "tokenizer.ggml.model": "none"}
    path = write_gguf(tmp_path / "x.gguf", said, written)
    prompt = np.random.default_rng(0).integers(0, 101, 40).tolist()
    theirs = llama_cpp.Llama(
        str(path), n_ctx=64, n_threads=1, logits_all=True, verbose=False
    )
    theirs.eval(prompt)
    expected = np.array(theirs.scores[: len(prompt)])
    (got,) = score_all(ResidentEngine(load_weights(open_checkpoint(path))), [prompt])
    # Quantised: theirs rounds activations, too, and a route may tip over.
    worst = np.abs(got - expected).max(1) / expected.std()
    assert np.median(worst) <= bar and (kind != "F32" or worst.max() <= bar)

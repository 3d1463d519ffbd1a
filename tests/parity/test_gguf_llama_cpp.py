"""Logits of llama.cpp on the same tiny GGUF files (package `llama_cpp`)."""

import numpy as np
import pytest

from moe_edge.convert.gguf_blocks import decode
from moe_edge.convert.open import open_checkpoint
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import load_weights
from tests.support.gguf_files import from_hf, write_gguf
from tests.support.gguf_metadata import ARCHS
from tests.support.tiny_checkpoints import random_tensors, raw_config
from tests.support.tiny_models import score_all

llama_cpp = pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.parity
# What llama.cpp computes in one way only is set so.
CASES = {
    "olmoe": {"clip_qkv": None, "num_key_value_heads": 4},
    "mixtral": {"sliding_window": None},
    "qwen2_moe": {
        "mlp_only_layers": [],
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
    },
    "qwen3_moe": {"decoder_sparse_step": 1, "rope_theta": 1e4},
    "deepseek": {},
    # Without q_lora_rank it takes 27 layers only, those of V2-Lite.
    "deepseek_v2": {
        **{"rope_scaling": None, "topk_method": "greedy", "n_group": 1},
        "q_lora_rank": 12,
    },
    "deepseek_v3": {"n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "glm4_moe": {"norm_topk_prob": True},
    "glm4_moe_lite": {
        **{"mlp_layer_types": ["dense", "sparse", "sparse"], "norm_topk_prob": True},
        **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    },
    "solar_open": {
        **{"partial_rotary_factor": 1.0, "norm_topk_prob": True, "rope_theta": 1e6},
        **{"n_group": 1, "topk_group": 1},
    },
    "dots1": {"sliding_window": None, "num_key_value_heads": 4},
    "minimax_m2": {},
    # The shared expert is as wide as the converter says.
    "ernie4_5_moe": {"moe_layer_interval": 1, "intermediate_size": 80},
    "hunyuan_v1_moe": {"rope_scaling": None, "attention_bias": False},
    "granitemoe": {},
    "granitemoeshared": {},
    "exaone_moe": {
        **{"norm_topk_prob": True, "first_k_dense_replace": 1},
        **{"n_group": 1, "topk_group": 1},
        "layer_types": ["sliding_attention"] * 3,
        "routed_scaling_factor": 2.5,
    },
    "llama4_text": {
        **{"no_rope_layers": [1, 1, 1, 0], "attention_chunk_size": 8192},
        **{"floor_scale": 8192, "attn_scale": 0.1, "rope_theta": 5e5},
        "attention_bias": False,
    },
    "gemma4_text": {},
    # In sliding layers it sees one position less than the model's own code.
    "mimo_v2_flash": {"sliding_window": 101},
}
QUANTISED = {"olmoe": {"hidden_size": 64, "intermediate_size": 32}, "gpt_oss": {}}
KINDS = [(family, "F32") for family in CASES]
OTHERS = ("F16", "BF16", "Q8_0", "Q4_0", "MXFP4")
KINDS += [(family, kind) for family in QUANTISED for kind in OTHERS]
BAR = 1e-3  # of the logits' standard deviation
GELU_BAR = 5e-3  # it looks GELU up in a table of float16


@pytest.mark.parametrize("family, kind", KINDS)
def test_logits_are_those_of_llama_cpp(family, kind, tmp_path):
    """Of other types: those of llama.cpp on what the file means, as float32.

    On the file itself it rounds activations to its type, or to 8 bits, which changes
    logits of these small models by 2-6 % of their deviation where it is quantised.
    """
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
    if family == "glm4_moe_lite":  # which llama.cpp tells by its number of layers
        said["deepseek2.expert_gating_func"] = 2
    path = write_gguf(tmp_path / "x.gguf", said, written)
    prompt = np.random.default_rng(0).integers(0, 101, 40).tolist()
    meant = {n: (_meant(*each)) for n, each in written.items()}
    plain = write_gguf(tmp_path / "plain.gguf", said, meant)
    exact = {"type_k": 0, "type_v": 0, "flash_attn": False}  # a cache of float32
    theirs = llama_cpp.Llama(
        str(plain), n_ctx=64, n_threads=1, logits_all=True, verbose=False, **exact
    )
    theirs.eval(prompt)
    expected = np.array(theirs.scores[: len(prompt)])
    (got,) = score_all(ResidentEngine(load_weights(open_checkpoint(path))), [prompt])
    worst = np.abs(got - expected).max(1) / expected.std()
    assert worst.max() <= (GELU_BAR if family == "gemma4_text" else BAR)


def _meant(kind: str, shape, raw: bytes):
    """A tensor as float32."""
    values = decode(kind, np.frombuffer(raw, np.uint8)).astype(np.float32)
    return "F32", shape, values.tobytes()

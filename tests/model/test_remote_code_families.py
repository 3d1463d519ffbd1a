"""DeepSeek-MoE-16B and XVERSE-MoE, which transformers lacks, against NumPy."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from moe_edge.convert.open import open_checkpoint
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import load_weights
from tests.support import numpy_reference
from tests.support.tiny_models import score_all

COMMON = {
    "vocab_size": 53,
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
DEEPSEEK = COMMON | {
    "model_type": "deepseek",
    "num_key_value_heads": 3,
    "intermediate_size": 44,
    "moe_intermediate_size": 14,
    "n_routed_experts": 10,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
}
XVERSE = COMMON | {
    "model_type": "xverse",
    "intermediate_size": 18,
    "num_experts": 9,
    "moe_top_k": 3,
    "num_shared_experts": 2,
    "norm_topk_prob": False,
}


def tensors_of(hf: dict) -> dict[str, np.ndarray]:
    """Random tensors under the names that the published files use."""
    rng = np.random.default_rng(0)
    D, V = hf["hidden_size"], hf["vocab_size"]
    xverse = hf["model_type"] == "xverse"
    F = hf["intermediate_size"] if xverse else hf["moe_intermediate_size"]
    E = hf["num_experts"] if xverse else hf["n_routed_experts"]
    shared = F * (hf["num_shared_experts"] if xverse else hf["n_shared_experts"])
    shapes = {"model.embed_tokens.weight": (V, D), "lm_head.weight": (V, D)}

    def mlp(prefix, width):
        shapes[prefix + "gate_proj.weight"] = (width, D)
        shapes[prefix + "up_proj.weight"] = (width, D)
        shapes[prefix + "down_proj.weight"] = (D, width)

    norms = ["model.norm.weight"]
    for layer in range(hf["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        norms += [p + "input_layernorm.weight", p + "post_attention_layernorm.weight"]
        shapes |= {f"{p}self_attn.{name}_proj.weight": (D, D) for name in "qkvo"}
        if layer < hf.get("first_k_dense_replace", 0):
            mlp(p + "mlp.", hf["intermediate_size"])
            continue
        shapes[p + ("mlp.router.weight" if xverse else "mlp.gate.weight")] = (E, D)
        mlp(p + "mlp.shared_experts.", shared)
        for expert in range(E):
            mlp(f"{p}mlp.experts.{expert}.", F)
    tensors = {
        name: rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))
        for name, shape in shapes.items()
    }
    for name in norms:
        tensors[name] = 1 + 0.2 * rng.standard_normal(D, np.float32)
    return tensors


@pytest.mark.parametrize("family", [DEEPSEEK, XVERSE], ids=lambda hf: hf["model_type"])
def test_logits_match_numpy_reference(family, tmp_path):
    tensors = tensors_of(family)
    save_file(tensors, tmp_path / "model.safetensors")
    tokens = np.random.default_rng(1).integers(0, family["vocab_size"], 30).tolist()
    for normalised in (False, True):
        hf = family | {"norm_topk_prob": normalised}
        (tmp_path / "config.json").write_text(json.dumps(hf))
        reader = open_checkpoint(tmp_path)
        assert reader.config.moe.norm_topk == normalised
        # Once each way, both families: the rule itself is the router's.
        if normalised == (family is XVERSE):
            ours = score_all(ResidentEngine(load_weights(reader)), [tokens])[0]
            reference = numpy_reference.logits(tensors, hf, tokens)
            assert np.abs(ours - reference).max() / reference.std() <= 1e-4

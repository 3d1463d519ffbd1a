"""A tiny random Qwen2-MoE checkpoint as a Hugging Face folder, with a tokenizer."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = (
    "The river runs past the old mill, and the miller counts his sacks of flour. "
    "How many sacks are there? There are 12 sacks, 3 cats and 1 dog. "
    "Blåbærsyltetøy, naïve café, 東京, 🦊 and more. "
)
CONFIG = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "vocab_size": 320,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE of a few merges: characters often span several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=["<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def tiny_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face's names."""
    D, F, S = (
        CONFIG["hidden_size"],
        CONFIG["moe_intermediate_size"],
        CONFIG["shared_expert_intermediate_size"],
    )
    P = D // CONFIG["num_attention_heads"]
    G = P * CONFIG["num_key_value_heads"]
    shapes = {
        "model.embed_tokens.weight": (CONFIG["vocab_size"], D),
        "model.norm.weight": (D,),
        "lm_head.weight": (CONFIG["vocab_size"], D),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (D,),
            at + "post_attention_layernorm.weight": (D,),
            at + "self_attn.q_proj.weight": (D, D),
            at + "self_attn.q_proj.bias": (D,),
            at + "self_attn.k_proj.weight": (G, D),
            at + "self_attn.k_proj.bias": (G,),
            at + "self_attn.v_proj.weight": (G, D),
            at + "self_attn.v_proj.bias": (G,),
            at + "self_attn.o_proj.weight": (D, D),
            at + "mlp.gate.weight": (CONFIG["num_experts"], D),
            at + "mlp.shared_expert_gate.weight": (1, D),
        }
        names = {"shared_expert": S}
        names |= {f"experts.{e}": F for e in range(CONFIG["num_experts"])}
        for name, width in names.items():
            shapes[at + f"mlp.{name}.gate_proj.weight"] = (width, D)
            shapes[at + f"mlp.{name}.up_proj.weight"] = (width, D)
            shapes[at + f"mlp.{name}.down_proj.weight"] = (D, width)
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, np.float32)
        is_norm = name.endswith("norm.weight")
        tensors[name] = 1.0 + 0.1 * values if is_norm else values / np.sqrt(shape[-1])
    return {name: array.astype(np.float32) for name, array in tensors.items()}


def write_tiny_checkpoint(
    folder: Path, *, with_tokenizer: bool = True, **changes
) -> Path:
    """Writes config.json (with `changes`), model.safetensors and tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes, indent=1))
    save_file(tiny_tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    if with_tokenizer:
        tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return folder

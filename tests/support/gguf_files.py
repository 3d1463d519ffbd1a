"""Writes GGUF files, and Hugging Face models into them as llama.cpp's converter does.

Source: convert_hf_to_gguf.py of github.com/ggml-org/llama.cpp, as of 2026.
"""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
from tokenizers import Tokenizer

from moe_edge.convert.gguf_blocks import KINDS, NAMES
from moe_edge.convert.gguf_k_quants import LAYOUTS
from moe_edge.model import quantised

CODES = {name: code for code, name in NAMES.items()}
ARCHS = {
    "olmoe": "olmoe",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gpt_oss": "gpt-oss",
}
# HF names behind `model.layers.N.` and in front of it; experts are added below.
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.kv_b_proj.weight": "attn_kv_b.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.router.weight": "ffn_gate_inp.weight",
    "mlp.router.bias": "ffn_gate_inp.bias",
    "block_sparse_moe.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
}
for _side in ("q", "k", "v", "o"):
    _to = {"o": "output"}.get(_side, _side)
    for _end in ("weight", "bias"):
        _NAMES[f"self_attn.{_side}_proj.{_end}"] = f"attn_{_to}.{_end}"
for _side in ("gate", "up", "down"):
    for _from, _to in (
        ("mlp", ""),
        ("mlp.shared_expert", "_shexp"),
        ("mlp.shared_experts", "_shexp"),
    ):
        _NAMES[f"{_from}.{_side}_proj.weight"] = f"ffn_{_side}{_to}.weight"
_STACKED = {"gate": "gate", "up": "up", "down": "down"}
_STACKED |= {"w1": "gate", "w3": "up", "w2": "down"}


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value_bytes(value) -> bytes:
    """A metadata value with its type in front."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, int):
        return (
            struct.pack("<II", 4, value) if value >= 0 else struct.pack("<Ii", 5, value)
        )
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, list):
        if not value or isinstance(value[0], str):
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        value = np.array(value)
    code, dtype = {"f": (6, "<f4"), "i": (5, "<i4"), "b": (7, "?")}[value.dtype.kind]
    return struct.pack("<IIQ", 9, code, value.size) + value.astype(dtype).tobytes()


def write_gguf(path: Path, metadata: dict, tensors: dict) -> Path:
    """Writes a file.

    Args:
      tensors: name -> (type, shape, bytes).
    """
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += text(key) + value_bytes(value)
    offset, body = 0, b""
    for name, (kind, shape, raw) in tensors.items():
        head += text(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", CODES[kind], offset)
        body += raw + bytes(-len(raw) % 32)
        offset = len(body)
    path.write_bytes(head + bytes(-len(head) % 32) + body)
    return path


def encode(kind: str, array: np.ndarray) -> bytes:
    """An array as a tensor type (quantised ones: rows of a multiple of 32)."""
    array = np.ascontiguousarray(array, np.float32)
    if kind == "F32":
        return array.tobytes()
    if kind == "F16":
        return array.astype(np.float16).tobytes()
    if kind == "BF16":
        return array.astype(ml_dtypes.bfloat16).tobytes()
    return quantised.encode(kind.lower(), array.reshape(-1, 32)).tobytes()


def random_blocks(kind: str, shape: tuple[int, ...], rng) -> bytes:
    """Blocks of a type of `LAYOUTS` with any codes, and scales near a hundredth."""
    count = int(np.prod(shape)) // KINDS[kind].values
    blocks_N8 = rng.integers(0, 256, (count, KINDS[kind].size), np.uint8)
    block_N = blocks_N8.view(LAYOUTS[kind])[:, 0]
    for name in {"d", "m"} & set(block_N.dtype.names):
        block_N[name] = rng.normal(scale=0.01, size=count)
    return blocks_N8.tobytes()


def from_hf(raw: dict, tensors: dict, kind: str = "F32", *, old: bool = False):
    """(metadata, tensors for `write_gguf`) of a Hugging Face model.

    Args:
      raw: config.json.
      tensors: HF name -> float32 array.
      kind: of matrices whose rows can be quantised; others are float32.
      old: DeepSeek as converters wrote it before 2025.
    """
    family = raw["model_type"]
    found: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        prefix, rest = "", name
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            prefix = f"blk.{layer}."
        if ".experts." in rest:
            _stack(found, raw, prefix, rest, array)
        elif rest.endswith("kv_b_proj.weight") and not old:
            _split_kv(found, raw, prefix, array)
        else:
            if family == "mixtral" and rest.startswith(("self_attn.q", "self_attn.k")):
                key = "num_attention_heads" if ".q_" in rest else "num_key_value_heads"
                array = _permute(array, raw[key])
            target = _NAMES[rest]
            if family == "gpt_oss" and target == "ffn_norm.weight":
                target = "post_attention_norm.weight"
            found[prefix + target] = array
    written = {}
    for name, array in found.items():
        if name.endswith("ffn_gate_inp_shexp.weight"):
            array = array.reshape(-1)
        fits = array.ndim > 1 and (kind in ("F16", "BF16") or array.shape[-1] % 32 == 0)
        kept = "ffn_gate_inp" in name or name.endswith("bias")  # as llama-quantize does
        own = kind if fits and not kept else "F32"
        written[name] = (own, array.shape, encode(own, array))
    return metadata(raw, old), written


def _stack(found, raw, prefix, rest, array):
    parts = rest.split(".")
    if raw["model_type"] != "gpt_oss":
        key = f"{prefix}ffn_{_STACKED[parts[3].removesuffix('_proj')]}_exps.weight"
        stack = found.setdefault(key, np.empty((_experts(raw), *array.shape), "f4"))
        stack[int(parts[2])] = array
        return
    is_bias, name = parts[2].endswith("_bias"), parts[2].removesuffix("_bias")
    end = "bias" if is_bias else "weight"
    array = array if is_bias else array.swapaxes(1, 2)
    if name == "down_proj":
        found[f"{prefix}ffn_down_exps.{end}"] = array
    else:
        found[f"{prefix}ffn_gate_exps.{end}"] = array[:, 0::2]
        found[f"{prefix}ffn_up_exps.{end}"] = array[:, 1::2]


def _split_kv(found, raw, prefix, array):
    nope, value = raw["qk_nope_head_dim"], raw["v_head_dim"]
    kv = array.reshape(raw["num_attention_heads"], nope + value, -1)
    found[prefix + "attn_k_b.weight"] = kv[:, :nope].transpose(0, 2, 1)
    found[prefix + "attn_v_b.weight"] = kv[:, nope:]


def _permute(array, heads):
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def _experts(raw) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next(raw[name] for name in names if name in raw)


def metadata(raw: dict, old: bool = False) -> dict:
    """What the converter says of a config.json."""
    family = raw["model_type"]
    arch = ARCHS[family]
    heads = raw["num_attention_heads"]
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    kind = rope.get("rope_type", rope.get("type", "default"))
    said = {
        "block_count": raw["num_hidden_layers"],
        "context_length": raw["max_position_embeddings"],
        "embedding_length": raw["hidden_size"],
        "feed_forward_length": raw["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": raw.get("num_key_value_heads", heads),
        "attention.layer_norm_rms_epsilon": raw.get("rms_norm_eps"),
        "expert_count": _experts(raw),
        "expert_used_count": raw["num_experts_per_tok"],
        "expert_feed_forward_length": raw.get(
            "moe_intermediate_size",
            raw["intermediate_size"] if family == "gpt_oss" else None,
        ),
        "attention.key_length": raw.get("head_dim"),
        "attention.value_length": raw.get("head_dim"),
        "rope.freq_base": None if theta is None else float(theta),
        "attention.clamp_kqv": raw.get("clip_qkv"),
        "attention.sliding_window": raw.get("sliding_window"),
        "expert_shared_feed_forward_length": raw.get("shared_expert_intermediate_size"),
    }
    if kind != "default":
        said |= {
            "rope.scaling.type": kind,
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope.get(
                "original_max_position_embeddings"
            ),
        }
    if "kv_lora_rank" in raw:
        head = raw["qk_nope_head_dim"] + raw["qk_rope_head_dim"]
        rank, value = raw["kv_lora_rank"], raw["v_head_dim"]
        said |= {
            "attention.q_lora_rank": raw["q_lora_rank"],
            "attention.kv_lora_rank": rank,
            "rope.dimension_count": raw["qk_rope_head_dim"],
            "leading_dense_block_count": raw["first_k_dense_replace"],
            "expert_shared_count": raw["n_shared_experts"],
            "expert_weights_scale": raw.get("routed_scaling_factor"),
            "expert_group_count": raw["n_group"],
            "expert_group_used_count": raw["topk_group"],
            "expert_gating_func": 2 if family == "deepseek_v3" else 1,
            "expert_weights_norm": raw.get("norm_topk_prob", False),
        }
        if "mscale_all_dim" in rope:
            log_mul = 0.1 * rope["mscale_all_dim"]
            said["rope.scaling.yarn_log_multiplier"] = log_mul
        if old:
            said |= {"attention.key_length": head, "attention.value_length": value}
        else:
            said |= {
                "attention.head_count_kv": 1,
                "attention.key_length": rank + raw["qk_rope_head_dim"],
                "attention.value_length": rank,
                "attention.key_length_mla": head,
                "attention.value_length_mla": value,
            }
    own = {f"{arch}.{key}": v for key, v in said.items() if v is not None}
    return {"general.architecture": arch, "general.name": "tiny"} | own


def tokenizer_metadata(tokenizer: Tokenizer, pre: str, **more) -> dict:
    """What llama.cpp's converter says of a byte-level tokenizer."""
    content = json.loads(tokenizer.to_str())
    vocab = content["model"]["vocab"] | {
        token["content"]: token["id"] for token in content["added_tokens"]
    }
    tokens = sorted(vocab, key=vocab.get)
    special = {t["content"]: 3 if t["special"] else 4 for t in content["added_tokens"]}
    merges = [
        m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]
    ]
    said = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": np.array([special.get(token, 1) for token in tokens]),
        "merges": merges,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (said | more).items()}

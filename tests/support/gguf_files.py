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
from moe_edge.model import quantising
from tests.support.gguf_metadata import experts, metadata

CODES = {name: code for code, name in NAMES.items()}
# HF names behind `model.layers.N.` and in front of it; experts are added below.
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.norm.bias": "output_norm.bias",
    "lm_head.bias": "output.bias",
    "input_layernorm.bias": "attn_norm.bias",
    "post_attention_layernorm.bias": "ffn_norm.bias",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.attention_sink_bias": "attn_sinks.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.kv_b_proj.weight": "attn_kv_b.weight",
    "self_attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "self_attn.indexer.wk.weight": "indexer.attn_k.weight",
    "self_attn.indexer.k_norm.weight": "indexer.k_norm.weight",
    "self_attn.indexer.k_norm.bias": "indexer.k_norm.bias",
    "self_attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.router.weight": "ffn_gate_inp.weight",
    "mlp.router.bias": "ffn_gate_inp.bias",
    "block_sparse_moe.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "self_attn.query_layernorm.weight": "attn_q_norm.weight",
    "self_attn.key_layernorm.weight": "attn_k_norm.weight",
    "mlp.gate.wg.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.router.layer.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.output_linear.weight": "ffn_down_exps.weight",
    "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
    "mlp.e_score_correction_bias": "exp_probs_b.bias",
    "feed_forward.router.weight": "ffn_gate_inp.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}
_NAMES |= {  # of layers with states
    "model.embedding_norm.weight": "token_embd_norm.weight",
    "operator_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "self_attn.out_proj.weight": "attn_output.weight",
    "self_attn.q_layernorm.weight": "attn_q_norm.weight",
    "self_attn.k_layernorm.weight": "attn_k_norm.weight",
    "feed_forward.gate.weight": "ffn_gate_inp.weight",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "feed_forward.w1.weight": "ffn_gate.weight",
    "feed_forward.w3.weight": "ffn_up.weight",
    "feed_forward.w2.weight": "ffn_down.weight",
    "conv.in_proj.weight": "shortconv.in_proj.weight",
    "conv.conv.weight": "shortconv.conv.weight",
    "conv.out_proj.weight": "shortconv.out_proj.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
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
        ("mlp.shared_mlp", "_shexp"),
        ("feed_forward", ""),
        ("feed_forward.shared_expert", "_shexp"),
    ):
        _NAMES[f"{_from}.{_side}_proj.weight"] = f"ffn_{_side}{_to}.weight"
# Gate and up in one tensor, one behind the other.
_HALVES = {
    "block_sparse_moe.input_linear.weight": "_exps",
    "shared_mlp.input_linear.weight": "_shexp",
}
_PERMUTED = ("mixtral", "granitemoe", "granitemoeshared", "deepseek")
_DELTA = ("qwen3_next", "qwen3_5_moe_text")
_POST_NORM = ("gpt_oss", "glm4_moe", "solar_open", "gemma4_text", *_DELTA)
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
    return quantising.encode(kind.lower(), array.reshape(-1, 32)).tobytes()


def random_blocks(kind: str, shape: tuple[int, ...], rng) -> bytes:
    """Blocks of a type of `LAYOUTS` with any codes, and scales near a hundredth."""
    count = int(np.prod(shape)) // KINDS[kind].values
    blocks_N8 = rng.integers(0, 256, (count, KINDS[kind].size), np.uint8)
    block_N = blocks_N8.view(LAYOUTS[kind])[:, 0]
    for name in {"d", "m"} & set(block_N.dtype.names):
        block_N[name] = rng.normal(scale=0.01, size=count)
    return blocks_N8.tobytes()


def from_hf(
    raw: dict,
    tensors: dict,
    kind: str = "F32",
    *,
    old: bool = False,
    joined: bool = False,
):
    """(metadata, tensors for `write_gguf`) of a Hugging Face model.

    Args:
      raw: config.json.
      tensors: HF name -> float32 array.
      kind: of matrices whose rows can be quantised; others are float32.
      old: DeepSeek as converters wrote it before 2025.
      joined: gate and up of experts in one tensor, q, k and v in another.
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
        elif rest in _HALVES:
            for side, half in zip(
                "gate up".split(), np.split(array, 2, -2), strict=True
            ):
                found[f"{prefix}ffn_{side}{_HALVES[rest]}.weight"] = half
        elif rest.endswith("kv_b_proj.weight") and not old:
            _split_kv(found, raw, prefix, array)
        else:
            if family in _PERMUTED and rest.startswith(("self_attn.q", "self_attn.k")):
                heads = raw["num_attention_heads"]
                if ".k_" in rest:
                    heads = raw.get("num_key_value_heads", heads)
                array = _permute(array, heads)
            if family in _DELTA:
                array = _of_delta(found, raw, prefix, rest, array)
                if rest == "linear_attn.in_proj_qkvz.weight":
                    continue
            array = array[:, 0] if "conv" in rest and array.ndim == 3 else array
            target = _NAMES[rest]
            if family in _POST_NORM and rest == "post_attention_layernorm.weight":
                target = "post_attention_norm.weight"
            found[prefix + target] = array
    if family == "gemma4_text":  # pairs of full layers that turn, and those that do not
        rope, pairs = (
            raw["rope_parameters"]["full_attention"],
            raw["global_head_dim"] // 2,
        )
        factors = np.full(pairs, 1e30, np.float32)
        factors[: int(pairs * rope["partial_rotary_factor"])] = 1
        found["rope_freqs.weight"] = factors
    if joined:
        _join(found, raw)
    written = {}
    for name, array in found.items():
        if name.endswith(("ffn_gate_inp_shexp.weight", "exp_probs_b.bias")):
            array = array.reshape(-1)  # axes of length one are dropped
        fits = array.ndim > 1 and (kind in ("F16", "BF16") or array.shape[-1] % 32 == 0)
        kept = "ffn_gate_inp" in name or name.endswith("bias")  # as llama-quantize does
        own = kind if fits and not kept else "F32"
        written[name] = (own, array.shape, encode(own, array))
    return metadata(raw, old), written


def _of_delta(found, raw, prefix, rest, array):
    """What the converter makes of a tensor of Qwen3-Next or 3.5."""
    heads, values = raw["linear_num_key_heads"], raw["linear_num_value_heads"]
    keys, each = heads * raw["linear_key_head_dim"], values // heads
    own = rest.removeprefix("linear_attn.")
    if rest.endswith("norm.weight") and own == rest:
        return array + 1
    if own == "in_proj_qkvz.weight":
        wide = each * raw["linear_value_head_dim"]
        width = raw["linear_key_head_dim"]
        by_head = array.reshape(heads, -1, array.shape[1])
        cuts = [width, 2 * width, 2 * width + wide]
        q, k, v, z = (
            part.reshape(-1, array.shape[1]) for part in np.split(by_head, cuts, 1)
        )
        found[prefix + "attn_qkv.weight"] = np.concatenate([q, k, v])
        found[prefix + "attn_gate.weight"] = z
        return array
    array = -np.exp(array) if own == "A_log" else array
    if raw["model_type"] != "qwen3_5_moe_text" or own == rest:
        return array

    def tiled(rows):
        by_head = rows.reshape(heads, each, -1, *rows.shape[1:])
        return by_head.swapaxes(0, 1).reshape(rows.shape)

    if own in ("in_proj_qkv.weight", "conv1d.weight"):
        return np.concatenate([array[: 2 * keys], tiled(array[2 * keys :])])
    if own == "out_proj.weight":
        return np.ascontiguousarray(tiled(array.T).T)
    return array if own == "norm.weight" else tiled(array)


def _stack(found, raw, prefix, rest, array):
    parts = rest.split(".")
    if raw["model_type"] == "llama4_text":
        array = array.swapaxes(1, 2)
        if parts[2] == "down_proj":
            found[f"{prefix}ffn_down_exps.weight"] = array
            return
        for side, half in zip(("gate", "up"), np.split(array, 2, 1), strict=True):
            found[f"{prefix}ffn_{side}_exps.weight"] = half
        return
    if raw["model_type"] != "gpt_oss":
        key = f"{prefix}ffn_{_STACKED[parts[3].removesuffix('_proj')]}_exps.weight"
        stack = found.setdefault(key, np.empty((experts(raw), *array.shape), "f4"))
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


def _join(found, raw) -> None:
    for layer in range(raw["num_hidden_layers"]):
        prefix = f"blk.{layer}."
        for target, names, axis in (
            ("ffn_gate_up_exps.weight", ("ffn_gate_exps", "ffn_up_exps"), 1),
            ("attn_qkv.weight", ("attn_q", "attn_k", "attn_v"), 0),
            ("attn_qkv.bias", ("attn_q", "attn_k", "attn_v"), 0),
        ):
            end = target.split(".")[1]
            own = [found.pop(f"{prefix}{name}.{end}", None) for name in names]
            if own[0] is not None:
                found[prefix + target] = np.concatenate(own, axis)


def _split_kv(found, raw, prefix, array):
    nope, value = raw["qk_nope_head_dim"], raw["v_head_dim"]
    kv = array.reshape(raw["num_attention_heads"], nope + value, -1)
    found[prefix + "attn_k_b.weight"] = kv[:, :nope].transpose(0, 2, 1)
    found[prefix + "attn_v_b.weight"] = kv[:, nope:]


def _permute(array, heads):
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


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

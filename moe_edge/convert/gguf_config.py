"""GGUF metadata -> a Hugging Face config.json, which `families.py` then reads.

So refusals and the meaning of fields stay in one place. A key of the architecture that
nobody asks for is refused by name: it may change what the model computes.
"""

from decimal import Decimal
from typing import Any

import numpy as np

from moe_edge.convert import families
from moe_edge.convert.gguf_file import GgufFile
from moe_edge.convert.gguf_names import FAMILIES, ROPE_FACTORS, TOP, layer_prefix
from moe_edge.core.checks import CheckpointError, ConfigError, check_known

_SOFTMAX, _SIGMOID, _SOFTMAX_CHOSEN = 1, 2, 3  # expert_gating_func
# Keys that never change what is computed, or say what tensors say.
_HARMLESS = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
_ADVICE = "convert the model from its Hugging Face folder instead"


class _Metadata:
    """The keys of one architecture, which remembers what was asked for."""

    def __init__(self, file: GgufFile, arch: str):
        self._file, self._prefix = file, arch + "."
        self._used = set(_HARMLESS)

    def get(self, key: str, default: Any = None) -> Any:
        """A value; of a list of equal values, one a layer, that value."""
        self._used.add(key)
        value = self._file.metadata.get(self._prefix + key, default)
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if isinstance(value, list):
            if not value or any(each != value[0] for each in value):
                raise ConfigError(
                    f"{self._file.path}: {self._prefix}{key} is {str(value)[:60]}, "
                    f"expected the same value for all layers; {_ADVICE}"
                )
            value = value[0]
        return value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(
                f"{self._file.path} lacks metadata key {self._prefix}{key}; {_ADVICE}"
            )
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer that is computed with here; others are judged by `families.py`."""
        value = self.need(key) if default is None else self.get(key, default)
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise self.bad(key, value, "an integer of 0 or more")
        return value

    def only(self, key: str, *allowed) -> None:
        """Refuses `key` unless it is absent or one of `allowed`."""
        value = self.get(key)
        if value is not None and value not in allowed:
            raise self.bad(key, value, " or ".join(f"{each!r:.60}" for each in allowed))

    def bad(self, key: str, value, expected: str) -> ConfigError:
        return ConfigError(
            f"{self._file.path}: {self._prefix}{key} is {value!r:.60}, expected "
            f"{expected}; {_ADVICE}"
        )

    def finish(self) -> None:
        unknown = [
            f"{key}={value!r:.60}"
            for key, value in self._file.metadata.items()
            if key.startswith(self._prefix)
            and key.removeprefix(self._prefix) not in self._used
        ]
        if unknown:
            raise ConfigError(
                f"{self._file.path} has metadata that may change what the model "
                f"computes and is not implemented: {', '.join(sorted(unknown)[:8])}; "
                f"{_ADVICE}"
            )


def hf_config(file: GgufFile) -> dict[str, Any]:
    """The config.json of the model in a GGUF file.

    Raises:
      CheckpointError: no model, or keys missing; ConfigError: an architecture or value
        that is not implemented.
    """
    arch = file.metadata.get("general.architecture")
    check_known(f"architecture in {file.path}", str(arch)[:60], FAMILIES)
    family, meta = FAMILIES[arch], _Metadata(file, arch)
    if not meta.get("expert_count"):
        raise ConfigError(
            f"{file.path}: {arch}.expert_count is absent or 0, expected a "
            "Mixture-of-Experts model; dense models are not supported"
        )
    embed = file.tensors.get(TOP["embed"])
    if embed is None or len(embed.shape) != 2:
        raise CheckpointError(
            f"{file.path} lacks the matrix {TOP['embed']}; it holds no whole model"
        )
    _check_rope_factors(file)
    config: dict[str, Any] = {
        "hidden_size": meta.need("embedding_length"),
        "num_hidden_layers": meta.integer("block_count")
        - meta.integer("nextn_predict_layers", 0),
        "num_attention_heads": meta.integer("attention.head_count"),
        "max_position_embeddings": meta.need("context_length"),
        "rms_norm_eps": meta.need("attention.layer_norm_rms_epsilon"),
        "vocab_size": embed.shape[0],
        "tie_word_embeddings": TOP["head"] not in file.tensors,
    }
    if arch == "deepseek2":
        config |= _deepseek(meta)
    else:
        config |= _gqa(meta, file, family, config)
    family = config.setdefault("model_type", family)
    names = families.FAMILIES[family].experts
    config[names.experts[0]] = meta.need("expert_count")
    config[names.top_k[0]] = meta.need("expert_used_count")
    width = meta.get("expert_feed_forward_length")
    dense = meta.get("feed_forward_length")
    if names.width != ("intermediate_size",) and dense is not None:
        config["intermediate_size"] = dense
    config[names.width[0]] = dense if width is None else width
    meta.finish()
    return config | _special_ids(file)


def _gqa(meta: _Metadata, file: GgufFile, family: str, config: dict) -> dict:
    heads = config["num_attention_heads"]
    found: dict[str, Any] = {
        "num_key_value_heads": meta.get("attention.head_count_kv", heads),
        "rope_parameters": _rope(meta, family),
    }
    key_length = meta.get("attention.key_length")
    if key_length is not None:
        found["head_dim"] = key_length
    else:
        key_length = meta.integer("embedding_length") // max(heads, 1)
    meta.only("attention.value_length", key_length)
    meta.only("rope.dimension_count", key_length)
    chosen = _SOFTMAX_CHOSEN if family == "gpt_oss" else _SOFTMAX
    meta.only("expert_gating_func", chosen)
    for key in ("expert_weights_scale", "expert_group_count"):
        meta.only(key, 0, 1)
    meta.only("expert_group_used_count", 0, 1)
    norm = meta.get("expert_weights_norm")
    has_bias = layer_prefix(0) + "attn_q.bias" in file.tensors
    if family in ("mixtral", "gpt_oss"):
        meta.only("expert_weights_norm", True)  # their only rule
    else:
        # llama.cpp's rule where the file is silent.
        found["norm_topk_prob"] = family == "qwen3_moe" if norm is None else norm
    if family == "olmoe":
        found["clip_qkv"] = meta.get("attention.clamp_kqv") or None
    if family in ("mixtral", "gpt_oss"):
        found["sliding_window"] = meta.get("attention.sliding_window") or None
    if family in ("olmoe", "qwen3_moe", "gpt_oss"):
        found["attention_bias"] = has_bias
    if family == "qwen2_moe":
        found["qkv_bias"] = has_bias
        found["shared_expert_intermediate_size"] = meta.need(
            "expert_shared_feed_forward_length"
        )
        meta.get("expert_shared_count")
    if family in ("qwen2_moe", "qwen3_moe"):
        # A layer without a router is dense.
        found["mlp_only_layers"] = [
            layer
            for layer in range(min(config["num_hidden_layers"], len(file.tensors)))
            if layer_prefix(layer) + "ffn_gate_inp.weight" not in file.tensors
        ]
    return found


def _deepseek(meta: _Metadata) -> dict:
    """V3 routes by sigmoid, V2 by softmax.

    Files from 2025 on describe attention as llama.cpp runs it (one head as wide as the
    latent) and have the model's own widths in keys that end in `_mla`.
    """
    scoring = meta.get("expert_gating_func", _SOFTMAX)
    if scoring not in (_SOFTMAX, _SIGMOID):
        raise meta.bad("expert_gating_func", scoring, "1 (softmax) or 2 (sigmoid)")
    is_v3 = scoring == _SIGMOID
    meta.only("attention.head_count_kv", 1, meta.integer("attention.head_count"))
    wide, rope_dim = (
        meta.get("attention.key_length"),
        meta.integer("rope.dimension_count"),
    )
    value_dim = meta.get("attention.value_length")
    head_dim = meta.integer("attention.key_length_mla", wide)
    nope_dim = head_dim - rope_dim
    found = {
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "kv_lora_rank": meta.need("attention.kv_lora_rank"),
        "q_lora_rank": meta.get("attention.q_lora_rank"),
        "qk_nope_head_dim": nope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": meta.get("attention.value_length_mla", value_dim),
        "first_k_dense_replace": meta.get("leading_dense_block_count", 0),
        "n_shared_experts": meta.need("expert_shared_count"),
        "routed_scaling_factor": meta.get("expert_weights_scale") or 1.0,
        "rope_parameters": _rope(meta, "deepseek"),
    }
    meta.get("expert_shared_feed_forward_length")
    # A file without groups is computed without, as by llama.cpp.
    groups = meta.get("expert_group_count") or 1
    used = meta.get("expert_group_used_count") or 1
    if is_v3:
        found["norm_topk_prob"] = meta.get("expert_weights_norm", False)
        found |= {"n_group": groups, "topk_group": used, "num_nextn_predict_layers": 0}
    else:
        meta.only("expert_weights_norm", False)
        method = "greedy" if groups == 1 else "group_limited_greedy"
        found |= {"topk_method": method, "n_group": groups, "topk_group": used}
    return found


def _rope(meta: _Metadata, family: str) -> dict:
    found = {"rope_theta": meta.get("rope.freq_base", 10_000.0)}
    factor = meta.get("rope.scaling.factor", meta.get("rope.scale_linear"))
    kind = meta.get("rope.scaling.type")
    if kind is None:  # llama.cpp's default
        kind = "linear" if factor not in (None, 0, 1) else "none"
    original = meta.get("rope.scaling.original_context_length")
    log_mul = meta.get("rope.scaling.yarn_log_multiplier")
    betas = {
        name: meta.get("rope.scaling.yarn_" + name)
        for name in ("beta_fast", "beta_slow")
    }
    attention_factor = meta.get("rope.scaling.yarn_attn_factor")
    meta.only("rope.scaling.attn_factor", 1)
    if kind == "none":
        return found | {"rope_type": "default"}
    found |= {"rope_type": str(kind)[:60], "factor": factor}
    if kind != "yarn":
        return found  # linear, or refused by name
    meta.only("rope.scaling.yarn_ext_factor", 1, -1)
    found |= {"original_max_position_embeddings": original} | betas
    if attention_factor is not None:
        found["attention_factor"] = attention_factor
    if log_mul:
        if family != "deepseek":
            raise meta.bad("rope.scaling.yarn_log_multiplier", log_mul, "none")
        if not isinstance(log_mul, float):
            raise meta.bad("rope.scaling.yarn_log_multiplier", log_mul, "a number")
        # A tenth of mscale_all_dim; llama.cpp, too, takes mscale to be the same.
        mscale = float(Decimal(repr(log_mul)) * 10)
        found |= {"mscale": mscale, "mscale_all_dim": mscale}
    if family == "gpt_oss":
        found["truncate"] = False  # the model's own; a file cannot say it
    return {name: value for name, value in found.items() if value is not None}


def _special_ids(file: GgufFile) -> dict:
    """Begin and end of a text."""
    ids = {}
    for name in ("bos", "eos", "eot", "eom"):
        key = f"tokenizer.ggml.{name}_token_id"
        ids[name] = file.metadata.get(key)
        if type(ids[name]) not in (int, type(None)):
            raise ConfigError(
                f"{file.path}: {key} is {ids[name]!r:.60}, expected the id of a token"
            )
    ends = (ids["eos"], ids["eot"], ids["eom"])
    stops = list(dict.fromkeys(i for i in ends if i is not None))
    return {
        "bos_token_id": ids["bos"],
        "eos_token_id": (stops if len(stops) > 1 else stops[0]) if stops else None,
    }


def _check_rope_factors(file: GgufFile) -> None:
    """Factors of single rope frequencies (Llama 3.1) are refused unless all are one."""
    if ROPE_FACTORS in file.tensors and np.any(file.read(ROPE_FACTORS) != 1):
        raise ConfigError(
            f"{file.path}: {ROPE_FACTORS} scales single rope frequencies, which is not "
            f"implemented; {_ADVICE}"
        )

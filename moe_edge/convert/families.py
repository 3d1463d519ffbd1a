"""Hugging Face config.json -> ModelConfig, one small function per family."""

from typing import Any

from moe_edge.convert import family_deepseek as deep
from moe_edge.convert import family_gqa as gqa
from moe_edge.convert.hf_config import Fields
from moe_edge.core.checks import ConfigError
from moe_edge.model.config import ModelConfig

# model_type -> fields that become keyword arguments of ModelConfig.
FAMILIES = {
    "olmoe": gqa.olmoe,
    "mixtral": gqa.mixtral,
    "qwen2_moe": gqa.qwen2_moe,
    "qwen3_moe": gqa.qwen3_moe,
    "gpt_oss": gqa.gpt_oss,
    "deepseek_v2": deep.deepseek_v2,
    "deepseek_v3": deep.deepseek_v3,
    "kimi_k2": deep.deepseek_v3,
    "deepseek": deep.deepseek,
    "xverse": deep.xverse,
}

# End-of-text ids that transformers fills in where config.json is silent.
_EOS = {"olmoe": 50279, "mixtral": 2, "deepseek_v2": 2, "deepseek_v3": 1, "kimi_k2": 1}


def config_from_hf(
    raw: dict[str, Any], generation: dict[str, Any] | None = None
) -> ModelConfig:
    """Interprets a parsed config.json.

    Args:
      raw: the config.json as a dict.
      generation: the generation_config.json next to it; its end-of-text ids win, as
        they do in `generate`.
    Raises:
      ConfigError: unknown model_type or field, or a value that is not implemented.
    """
    if not isinstance(raw, dict):
        raise ConfigError(f"config.json must hold an object, got {type(raw).__name__}")
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"unknown model_type {model_type!r}; known: {', '.join(sorted(FAMILIES))}"
        )
    fields = Fields(raw, model_type)
    fields.get("quantization_config")  # judged by quantize.py
    parts = FAMILIES[model_type](fields)
    stops = fields.get("eos_token_id", _EOS.get(model_type))
    bos = fields.get("bos_token_id")
    if generation:
        stops = generation.get("eos_token_id", stops)
        bos = generation.get("bos_token_id", bos)
    config = ModelConfig(
        model_type=model_type,
        vocab_size=fields.int("vocab_size"),
        d_model=fields.int("hidden_size"),
        tie_embeddings=fields.bool("tie_word_embeddings", False),
        bos_id=_token_ids("bos_token_id", bos)[0] if bos is not None else None,
        eos_ids=_token_ids("eos_token_id", stops) if stops is not None else (),
        hf_config=raw,
        **parts,
    )
    fields.finish()
    return config


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    if not ids or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ConfigError(f"{name} is {value!r}, expected an integer or a list of them")
    return tuple(ids)

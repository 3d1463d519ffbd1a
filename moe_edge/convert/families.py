"""All families, and Hugging Face config.json -> ModelConfig."""

from collections.abc import Callable
from typing import Any

from moe_edge.convert import family_deepseek as deep
from moe_edge.convert import family_glm4 as glm4
from moe_edge.convert import family_gqa as gqa
from moe_edge.convert.family_dots1 import DOTS1
from moe_edge.convert.family_dsa import DEEPSEEK_V32, GLM_MOE_DSA
from moe_edge.convert.family_ernie import ERNIE4_5_MOE
from moe_edge.convert.family_exaone_moe import EXAONE_MOE
from moe_edge.convert.family_flex_olmo import FLEX_OLMO
from moe_edge.convert.family_gemma4 import GEMMA4_TEXT
from moe_edge.convert.family_granite import GRANITEMOE, GRANITEMOESHARED
from moe_edge.convert.family_hunyuan import HUNYUAN_V1_MOE
from moe_edge.convert.family_lfm2_moe import LFM2_MOE
from moe_edge.convert.family_llama4 import LLAMA4_TEXT
from moe_edge.convert.family_mimo_v2_flash import MIMO_V2_FLASH
from moe_edge.convert.family_minimax_m2 import MINIMAX_M2
from moe_edge.convert.family_parts import end_positions
from moe_edge.convert.family_phimoe import PHIMOE
from moe_edge.convert.family_qwen3_next import QWEN3_5_MOE_TEXT, QWEN3_NEXT
from moe_edge.convert.hf_config import Fields
from moe_edge.convert.hf_files import CONFIG_NAME, GENERATION_NAME
from moe_edge.convert.neutral_fields import neutral_values
from moe_edge.core.checks import ConfigError, check_known
from moe_edge.model.config import ModelConfig

FAMILIES = {
    "olmoe": gqa.OLMOE,
    "mixtral": gqa.MIXTRAL,
    "qwen2_moe": gqa.QWEN2_MOE,
    "qwen3_moe": gqa.QWEN3_MOE,
    "gpt_oss": gqa.GPT_OSS,
    "deepseek_v2": deep.DEEPSEEK_V2,
    "deepseek_v3": deep.DEEPSEEK_V3,
    "kimi_k2": deep.DEEPSEEK_V3,
    "deepseek": deep.DEEPSEEK,
    "xverse": deep.XVERSE,
    "flex_olmo": FLEX_OLMO,
    "granitemoe": GRANITEMOE,
    "granitemoeshared": GRANITEMOESHARED,
    "phimoe": PHIMOE,
    "deepseek_v32": DEEPSEEK_V32,
    "glm_moe_dsa": GLM_MOE_DSA,
    "exaone_moe": EXAONE_MOE,
    "glm4_moe": glm4.GLM4_MOE,
    "glm4_moe_lite": glm4.GLM4_MOE_LITE,
    "solar_open": glm4.SOLAR_OPEN,
    "dots1": DOTS1,
    "minimax_m2": MINIMAX_M2,
    "ernie4_5_moe": ERNIE4_5_MOE,
    "hunyuan_v1_moe": HUNYUAN_V1_MOE,
    "mimo_v2_flash": MIMO_V2_FLASH,
    "llama4_text": LLAMA4_TEXT,
    "gemma4_text": GEMMA4_TEXT,
    "lfm2_moe": LFM2_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_moe_text": QWEN3_5_MOE_TEXT,
}


# model_type of a folder with other modalities -> of its text model.
WHOLE = {each.whole: name for name, each in FAMILIES.items() if each.whole}
# What the config.json of such a folder says of the text model, too.
_OF_BOTH = ("tie_word_embeddings", "torch_dtype", "dtype", "quantization_config")
_IDS = ("eos_token_id", "bos_token_id")  # those of the whole win


def text_part(raw: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the text model alone of one with other modalities.

    Raises:
      ConfigError: it has none, or one of another family.
    """
    text, name = raw.get("text_config"), WHOLE[raw["model_type"]]
    if not isinstance(text, dict) or text.get("model_type", name) != name:
        raise ConfigError(
            f"config.json of {raw['model_type']}: text_config is {text!r:.80}, "
            f"expected an object of model_type {name!r}"
        )
    both = {each: raw[each] for each in _OF_BOTH if each in raw}
    ids = {each: raw[each] for each in _IDS if raw.get(each) is not None}
    return both | text | ids | {"model_type": name}


# Families whose layers keep a state in place of keys and values, and which.
RECURRENT = {
    "kimi_linear": "a delta-net's with a decay a channel",
    "nemotron_h": "Mamba-2's",
}


def config_from_hf(
    raw: dict[str, Any],
    generation: dict[str, Any] | None = None,
    ignored: Callable[[str, str], None] | None = None,
) -> ModelConfig:
    """Interprets a parsed config.json.

    Args:
      raw: the config.json as a dict.
      generation: the generation_config.json next to it; its end-of-text ids win, as
        they do in `generate`.
      ignored: called with the file and what is wrong where ids of special tokens are
        outside the vocabulary, which are then left out; None: they are refused.
    Raises:
      ConfigError: unknown model_type or field, or a value that is not implemented.
    """
    if not isinstance(raw, dict):
        raise ConfigError(f"config.json must hold an object, got {type(raw).__name__}")
    if str(raw.get("model_type")) in WHOLE:
        raw = text_part(raw)
    model_type = str(raw.get("model_type"))  # anything else is an unknown text too
    if model_type in RECURRENT:
        raise ConfigError(
            f"{model_type} has layers with a state ({RECURRENT[model_type]}), which "
            "are not implemented; expected attention in every layer"
        )
    check_known("model_type", model_type, (*FAMILIES, *WHOLE))
    family = FAMILIES[model_type]
    fields = Fields(raw, model_type, family)
    fields.get("quantization_config")  # judged by quantize.py
    parts = {
        "num_layers": fields.layers,
        "max_positions": fields.positions,
        "norm_eps": fields.norm_eps,
        "activation": fields.activation,
    } | family.read(fields)
    for attention in (parts["attention"], *parts.get("other_attention", ())):
        rope = attention.rope
        if rope is not None and rope.kind == "longrope":
            why = "beyond, longrope rotates all positions by other frequencies"
            end = rope.original_positions
            why = f"{why}, which is not implemented"
            parts |= end_positions(parts["max_positions"], end, why)
    vocab = fields.int("vocab_size")
    special: dict[str, tuple[int, ...]] = {}
    for name, default in (("eos_token_id", family.eos), ("bos_token_id", family.bos)):
        where, found, wrong = _token_ids(fields, name, generation, vocab, default)
        special[name] = found
        if wrong and ignored is None:
            raise ConfigError(f"{where} of {model_type}: {wrong}; correct it")
        if wrong:
            ignored(where, wrong)
            if where == CONFIG_NAME:
                raw = raw | {name: list(found) or None}
    starts = special["bos_token_id"]
    config = ModelConfig(
        model_type=model_type,
        vocab_size=vocab,
        d_model=fields.int("hidden_size"),
        tie_embeddings=fields.bool("tie_word_embeddings", family.tied),
        bos_id=starts[0] if starts else None,
        eos_ids=special["eos_token_id"],
        hf_config=raw,
        **parts,
    )
    fields.finish(neutral_values(config))
    return config


def _token_ids(
    fields: Fields,
    name: str,
    generation: dict[str, Any] | None,
    vocab: int,
    default: int | None = None,
) -> tuple[str, tuple[int, ...], str]:
    """Ids of special tokens, from generation_config.json or else config.json.

    Args:
      default: the id where neither file names one. transformers writes it into the
        files of small models, too; it counts only where the vocabulary has it.
    Returns:
      The file; the ids that the vocabulary has; what is wrong if there are others.
    """
    value, where = fields.get(name, default), CONFIG_NAME
    if generation and name in generation:
        value, where = generation[name], GENERATION_NAME
    if value is None or (value == default and default >= vocab):
        return where, (), ""
    ids = value if isinstance(value, list) else [value]
    found = tuple(i for i in ids if type(i) is int and 0 <= i < vocab)
    if ids and len(found) == len(ids):
        return where, found, ""
    return (
        where,
        found,
        f"{name} is {value!r:.60}, expected a token id in 0..{vocab - 1} (vocab_size "
        f"is {vocab}) or a list of them",
    )

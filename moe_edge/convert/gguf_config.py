"""GGUF metadata -> a Hugging Face config.json, which `families.py` then reads."""

from typing import Any

from moe_edge.convert.families import FAMILIES
from moe_edge.convert.gguf_families import ARCHITECTURES, Architecture
from moe_edge.convert.gguf_file import GgufFile
from moe_edge.convert.gguf_metadata import Metadata
from moe_edge.convert.gguf_names import TOP
from moe_edge.core.checks import CheckpointError, ConfigError, check_known


def architecture(file: GgufFile) -> tuple[str, Architecture]:
    """Name and entry of the architecture of a GGUF file.

    Raises:
      ConfigError: one that is not implemented.
    """
    arch = file.metadata.get("general.architecture")
    check_known(f"architecture in {file.path}", str(arch)[:60], ARCHITECTURES)
    return arch, ARCHITECTURES[arch]


def hf_config(file: GgufFile) -> tuple[dict[str, Any], set[str]]:
    """The config.json of the model in a GGUF file, and tensors that said part of it.

    Raises:
      CheckpointError: no model, or keys missing; ConfigError: an architecture or value
        that is not implemented.
    """
    arch, entry = architecture(file)
    meta = Metadata(file, arch)
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
    if meta.layers > len(file.tensors):
        raise CheckpointError(
            f"{file.path}: {arch}.block_count is {meta.layers}, the file has "
            f"{len(file.tensors)} tensors; it holds no whole model"
        )
    config: dict[str, Any] = {
        "model_type": entry.model_type,
        "hidden_size": meta.need("embedding_length"),
        "num_hidden_layers": meta.layers,
        "num_attention_heads": meta.heads,
        "max_position_embeddings": meta.need("context_length"),
        "rms_norm_eps": meta.need("attention.layer_norm_rms_epsilon"),
        "vocab_size": embed.shape[0],
        "tie_word_embeddings": TOP["head"] not in file.tensors,
    }
    config |= entry.fields(meta)
    names = FAMILIES[config["model_type"]].experts
    config[names.experts[0]] = meta.need("expert_count")
    config[names.top_k[0]] = meta.need("expert_used_count")
    width = meta.get("expert_feed_forward_length")
    dense = meta.get("feed_forward_length")
    if names.width != ("intermediate_size",) and dense is not None:
        config.setdefault("intermediate_size", dense)
    config[names.width[0]] = dense if width is None else width
    meta.finish()
    return config | _special_ids(file), meta.needed


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

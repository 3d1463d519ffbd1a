"""The small files of a Hugging Face folder: config, tokenizer, notes.

They are carried through a conversion byte for byte. Only config.json may change,
when the weights do: another dtype, or dequantised.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

from moe_edge.core.checks import CheckpointError
from moe_edge.core.json_reader import read_json

CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"
# Patterns of what belongs to a model besides its weights.
_CARRIED = (
    *(GENERATION_NAME, "tokenizer*", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.*", "merges.txt", "chat_template*", "*.model"),
    *("*.tiktoken", "configuration_*.py", "modeling_*.py", "tokenization_*.py"),
    *("README.md", "LICENSE*", "USAGE_POLICY"),
)
_MAX_BYTES = 256 << 20


def converted_config(
    raw: dict[str, Any], dtype_name: str, changed: bool
) -> dict[str, Any]:
    """config.json of the unquantised copy in `dtype_name`.

    Args:
      raw: the source's config.json.
      changed: whether the weights' dtype differs from what the file says (cast or
        dequantised); the same object is returned where it does not.
    """
    if not changed:
        return raw
    config = copy.deepcopy(raw)
    config.pop("quantization_config", None)
    names = [name for name in ("dtype", "torch_dtype") if name in config]
    for name in names or ["dtype"]:
        config[name] = dtype_name
    return config


def read_generation(folder: Path) -> dict[str, Any] | None:
    """generation_config.json, if there is one.

    Raises:
      CheckpointError: it cannot be read.
    """
    path = folder / GENERATION_NAME
    if not path.is_file():
        return None
    generation = read_json(path, CheckpointError, strict=False)
    if not isinstance(generation, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return generation


def copy_small_files(
    source: Path, target: Path, hf_config: dict[str, Any]
) -> list[str]:
    """Copies what belongs to the model but its weights; returns the names.

    config.json keeps its very bytes unless `hf_config` differs from it.
    """
    copied = []
    for path in sorted(source.iterdir()):
        carried = any(path.match(pattern) for pattern in _CARRIED)
        if not (carried and path.is_file()) or path.name.endswith(".safetensors"):
            continue
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(
                f"{path} has {path.stat().st_size} bytes, expected at most "
                f"{_MAX_BYTES} for a file that is not weights"
            )
        shutil.copyfile(path, target / path.name)
        copied.append(path.name)
    original = source / CONFIG_NAME
    if (
        original.is_file()
        and read_json(original, CheckpointError, strict=False) == hf_config
    ):
        shutil.copyfile(original, target / CONFIG_NAME)
    else:
        dump_json(target / CONFIG_NAME, hf_config)
    return [*copied, CONFIG_NAME]


def dump_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")

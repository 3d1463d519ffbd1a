"""Opens a checkpoint of either format by path."""

import re
from pathlib import Path

import numpy as np

from moe_edge.checkpoint.manifest import HF_FOLDER, MANIFEST_NAME, read_manifest
from moe_edge.checkpoint.reader import CheckpointReader
from moe_edge.checkpoint.schema import name_some
from moe_edge.convert.families import config_from_hf
from moe_edge.convert.gguf_reader import GgufReader
from moe_edge.convert.hf_files import CONFIG_NAME, read_generation
from moe_edge.convert.hf_reader import HfReader
from moe_edge.convert.hf_tensors import HEAD
from moe_edge.core.checks import CheckpointError, ConfigError
from moe_edge.core.progress import say_once
from moe_edge.model.quantised import format_of

DEFAULT_MODEL = Path(__file__).resolve().parent.parent / "default_model"
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def check_floats(reader, purpose: str) -> None:
    """Raises ConfigError where weights are quantised and `purpose` needs floats."""
    kind = format_of(reader.layout.kind or reader.dense_kind)
    if kind is not None:
        raise ConfigError(
            f"{reader.path} has {kind} weights, whose neurons cannot be told apart in "
            f"blocks of 32: {purpose} takes the checkpoint it was made from; "
            "quantise the result (moe-edge convert --dtype)"
        )


def check_unpruned(reader, purpose: str) -> None:
    """Raises ConfigError where experts were removed and `purpose` needs all."""
    if "pruned" in (getattr(reader, "manifest", None) or {}):
        raise ConfigError(
            f"{reader.path} is pruned, and {purpose} takes the checkpoint it was made "
            "from"
        )


def _reported(reader, path: str | Path):
    """The reader; prints what it makes of tensors that its config does not ask for."""
    if reader.dropped:
        say_once(
            f"{path}: left out, as the model does not use them: "
            f"{name_some(reader.dropped)}"
        )
    if isinstance(reader, GgufReader) and reader.decoded_experts:
        records = len(reader.config.moe_layers) * reader.config.moe.num_experts
        num_bytes = records * reader.layout.num_bytes(reader.dtype)
        say_once(
            f"{path}: {reader.decoded_experts} experts are decoded to {reader.dtype}: "
            f"{num_bytes:,} bytes; moe-edge convert --expert_dtype q4_0 makes fewer"
        )
    if isinstance(reader, HfReader) and reader.untied:
        say_once(
            f"{path}: {HEAD} differs from the embedding, so it is used, although "
            "config.json has tie_word_embeddings=true"
        )
    return reader


def find_checkpoint(path: str | Path) -> tuple[str, Path]:
    """What a path leads to: "GGUF file", "Hugging Face folder" or "folder of ours".

    Args:
      path: the folder or file; "default" is the model shipped inside the package.
    Raises:
      CheckpointError: none of these.
    """
    folder = DEFAULT_MODEL if str(path) == "default" else Path(path)
    if folder.is_file():
        return "GGUF file", folder
    if not folder.is_dir():
        hint = "check the path"
        if _HUB_NAME.fullmatch(str(path)) and not folder.parent.exists():
            hint = (
                "if it is a model of the Hugging Face hub, download it first: hf "
                f"download {path} --local-dir {folder.name}, then give {folder.name}"
            )
        raise CheckpointError(
            f"checkpoint {folder} is not a folder or GGUF file; {hint}"
        )
    if (folder / MANIFEST_NAME).is_file():
        return "folder of ours", folder
    if (folder / CONFIG_NAME).is_file():
        return "Hugging Face folder", folder
    raise CheckpointError(
        f"{folder} holds neither {MANIFEST_NAME} (our format) nor {CONFIG_NAME} (a "
        "Hugging Face folder)"
    )


def open_checkpoint(
    path: str | Path, dtype: np.dtype | None = None
) -> CheckpointReader | HfReader | GgufReader:
    """Opens a folder of ours, a Hugging Face folder, a GGUF file, or "default".

    Args:
      path: see `find_checkpoint`.
      dtype: cast weights to it when they are read (None: as stored).
    Raises:
      CheckpointError: neither format, or damaged; ConfigError: a model or field that
        is not implemented.
    """
    kind, folder = find_checkpoint(path)
    if kind == "folder of ours":
        manifest = read_manifest(folder)

        def ignored(file: str, wrong: str) -> None:
            """Earlier versions converted such models; the ids never matter."""
            name = MANIFEST_NAME if file == CONFIG_NAME else f"{HF_FOLDER}/{file}"
            say_once(f"{folder / name}: {wrong}; other ids are ignored")

        config = config_from_hf(
            manifest["hf_config"], read_generation(folder / HF_FOLDER), ignored
        )
        return CheckpointReader(folder, manifest, config, dtype)
    reader = GgufReader if kind == "GGUF file" else HfReader
    return _reported(reader(folder, dtype), path)

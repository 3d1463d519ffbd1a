"""Writes trained parameters as a standard Hugging Face folder in bfloat16.

`transformers` loads the folder as it is, and so does `--checkpoint FOLDER`. Names and
shapes come from `convert/rules.py`, the table that reading uses too.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from tokenizers import Tokenizer

from moe_edge.checkpoint.schema import dense_items, item_shapes
from moe_edge.convert import rules
from moe_edge.convert.families import config_from_hf
from moe_edge.convert.safetensors_writer import SafetensorsWriter
from moe_edge.core.checks import ConfigError
from moe_edge.core.files import write_text
from moe_edge.core.out_folder import atomic_folder
from moe_edge.model.config import ModelConfig
from moe_edge.training import checkpoints
from moe_edge.training.default_config import hf_config
from moe_edge.training.options import Hyper
from moe_edge.training.start import Params
from moe_edge.training.tokenizer import save_tokenizer

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_SHARD_BYTES = 1 << 40  # one file


def read_newest(run_dir: Path):
    """(parameters, progress, config) of a run's newest checkpoint.

    Raises:
      ConfigError: there is none.
    """
    folder = run_dir / "checkpoints"
    restored = None
    if folder.is_dir():
        with checkpoints.open_checkpoints(folder) as manager:
            restored = checkpoints.restore(manager, Hyper())
    if restored is None:
        raise ConfigError(
            f"no training checkpoint in {folder}; expected one of moe-edge pretrain, "
            "which saves every few minutes and when it stops"
        )
    state, progress, config = restored
    return state.params, progress, config


def bfloat16_pieces(config: ModelConfig, params: Params) -> Iterator[rules.Piece]:
    """Every tensor of the folder, rounded to bfloat16."""
    for item in dense_items(config):
        prefix = "" if isinstance(item, str) else f"blocks.{item}."
        names = rules.dense_names(config, item)
        for name in item_shapes(config, item):
            array = np.asarray(params[prefix + name]).astype(BFLOAT16)
            yield rules.Piece(names[name], 0, array)
        if item in config.moe_layers:
            records_ER = np.asarray(params[f"experts.{item}"]).astype(BFLOAT16)
            for piece in rules.records_to_hf(config, item, 0, records_ER):
                yield piece._replace(array=np.ascontiguousarray(piece.array))


def check_exportable(config: ModelConfig) -> None:
    """Raises ConfigError unless a model is of the default one's kind, of any size."""
    if config.model_type != "qwen2_moe":
        raise ConfigError(
            f"a {config.model_type} model cannot be written, expected qwen2_moe, the "
            "default model's family"
        )
    # The width of dense layers is written but means nothing without dense layers.
    read_back = config_from_hf(hf_config(config))
    read_back = dataclasses.replace(read_back, dense_dim=config.dense_dim)
    if read_back != config:
        raise ConfigError(f"config {config} would be read back as {read_back}")


def export_hf(
    params: Params,
    config: ModelConfig,
    tokenizer: Tokenizer,
    out_dir: Path,
    *,
    extra_files: dict[str, str | bytes] | None = None,
    said: Mapping[str, int | str] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes the folder, all or nothing.

    Args:
      params: float32, see `training/start.py`.
      config: the architecture, of family qwen2_moe.
      out_dir: the new folder.
      extra_files: name -> content of files to put next to the model (card, picture).
      said: fields of config.json that say what the weights are (`hf_config.py`).
    Raises:
      ConfigError: see `check_exportable`.
      OutputError: the folder cannot be written.
    """
    check_exportable(config)
    raw = hf_config(config) | dict(said or {})
    shapes = rules.hf_shapes(config)
    generation = {
        "eos_token_id": list(config.eos_ids),
        "pad_token_id": config.eos_ids[0],
        "do_sample": False,
    }
    with atomic_folder(out_dir, overwrite) as folder:
        writer = SafetensorsWriter(
            folder, shapes, dict.fromkeys(shapes, BFLOAT16), _SHARD_BYTES
        )
        for piece in bfloat16_pieces(config, params):
            writer.write(piece)
        writer.close()
        save_tokenizer(tokenizer, folder, config.max_positions)
        for name, value in (
            ("config.json", raw),
            ("generation_config.json", generation),
        ):
            write_text(folder / name, json.dumps(value, indent=2) + "\n")
        for name, content in (extra_files or {}).items():
            data = content.encode() if isinstance(content, str) else content
            (folder / name).write_bytes(data)

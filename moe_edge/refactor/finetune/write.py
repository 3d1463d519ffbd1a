"""Writes a fine-tuned model: the old checkpoint's files but for its router's rows."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.checkpoint.dense import DENSE_FOLDER, DenseFiles, item_path
from moe_edge.checkpoint.experts_file import EXPERTS_FOLDER
from moe_edge.checkpoint.manifest import HF_FOLDER, MANIFEST_NAME
from moe_edge.checkpoint.reader import CheckpointReader
from moe_edge.convert.content_hash import content_sha256
from moe_edge.convert.hf_files import dump_json
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.files import atomic_folder
from moe_edge.refactor.finetune.step import Router


def stored_router(reader, router: Router) -> dict[str, np.ndarray]:
    """The rows in the dtypes that the checkpoint stores them in."""
    arrays = {}
    for path, array in router.items():
        _, layer, name = path.split(".", 2)
        dtype = reader.dense_dtypes(int(layer))[name]
        arrays[path] = np.asarray(array).astype(dtype)
    return arrays


def write_fine_tuned(
    reader: CheckpointReader,
    stored: dict[str, np.ndarray],
    out_dir: Path,
    fine_tuned: dict[str, Any],
) -> None:
    """Writes a checkpoint of ours, all or nothing; unchanged files are hard links.

    Records are never copied on one file system: to write into such a file in place
    changes both models. Removing either folder leaves the other whole.

    Args:
      reader: the model that was trained.
      stored: the new rows.
      out_dir: replaced.
      fine_tuned: for the manifest's `refactor`.
    Raises:
      OutputError: the folder cannot be written.
    """
    layers = reader.config.moe_layers
    with atomic_folder(out_dir, overwrite=True) as folder:
        changed = [item_path(reader.path, layer) for layer in layers]
        for name in (EXPERTS_FOLDER, HF_FOLDER, DENSE_FOLDER):
            _link_tree(reader.path / name, folder / name, changed)
        dense = DenseFiles(folder)
        for layer in layers:
            arrays = reader.dense(layer)
            paths = {name: f"blocks.{layer}.{name}" for name in arrays}
            new = {name: stored[path] for name, path in paths.items() if path in stored}
            dense.save(layer, arrays | new)
        refactor = reader.manifest["refactor"] | {"fine_tuned": fine_tuned}
        manifest = reader.manifest | {"refactor": refactor}
        dump_json(folder / MANIFEST_NAME, manifest)
        manifest["content_sha256"] = content_sha256(open_checkpoint(folder))
        dump_json(folder / MANIFEST_NAME, manifest)


def _link_tree(source: Path, target: Path, left_out: list[Path]) -> None:
    """Hard links a folder's files, or copies them where the file systems differ."""

    def link(old: str, new: str) -> None:
        try:
            os.link(old, new)
        except OSError:
            shutil.copy2(old, new)

    def ignore(at: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(at) / name in left_out]

    shutil.copytree(source, target, copy_function=link, ignore=ignore)

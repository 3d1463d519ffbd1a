"""Writes a fine-tuned model: the old checkpoint's files but for its router's rows."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.checkpoint.dense import DENSE_FOLDER, DenseFiles, item_path
from moe_edge.checkpoint.experts_file import EXPERTS_FOLDER
from moe_edge.checkpoint.manifest import HF_FOLDER, MANIFEST_NAME
from moe_edge.checkpoint.reader import CheckpointReader
from moe_edge.convert.content_hash import content_sha256
from moe_edge.convert.convert import convert_checkpoint
from moe_edge.convert.hf_files import dump_json
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.files import atomic_folder
from moe_edge.refactor.finetune.step import Router


def stored_router(reader, router: Router) -> dict[str, np.ndarray]:
    """The rows in the dtypes that the checkpoint stores them in."""
    arrays = {}
    for layer in reader.config.moe_layers:
        dtypes = reader.dense_dtypes(layer)
        for name, dtype in dtypes.items():
            path = f"blocks.{layer}.{name}"
            if path in router:
                arrays[path] = np.asarray(router[path]).astype(dtype)
    return arrays


def write_fine_tuned(
    reader,
    stored: dict[str, np.ndarray],
    out_dir: str | Path,
    fine_tuned: dict[str, Any],
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint of ours, all or nothing; unchanged files are hard links.

    Records are never copied on one file system: to write into such a file in place
    changes both models. Removing either folder leaves the other whole.

    Args:
      reader: the model that was trained, of either format.
      stored: see `stored_router`.
      out_dir: the new folder.
      fine_tuned: for the manifest: into `refactor`, or next to it where the model is
        not refactored.
    Raises:
      OutputError: the folder cannot be written.
    """
    with atomic_folder(out_dir, overwrite) as folder, _ours(reader, folder) as source:
        changed = [item_path(source.path, i) for i in source.config.moe_layers]
        for name in (EXPERTS_FOLDER, HF_FOLDER, DENSE_FOLDER):
            _link_tree(source.path / name, folder / name, changed)
        dense = DenseFiles(folder)
        for layer in source.config.moe_layers:
            arrays = source.dense(layer)
            new = {name: stored.get(f"blocks.{layer}.{name}") for name in arrays}
            dense.save(layer, arrays | {k: v for k, v in new.items() if v is not None})
        manifest = dict(source.manifest)
        if manifest.get("refactor") is None:
            manifest["fine_tuned"] = fine_tuned
        else:
            manifest["refactor"] = manifest["refactor"] | {"fine_tuned": fine_tuned}
        dump_json(folder / MANIFEST_NAME, manifest)
        manifest["content_sha256"] = content_sha256(open_checkpoint(folder))
        dump_json(folder / MANIFEST_NAME, manifest)


@contextlib.contextmanager
def _ours(reader, folder: Path) -> Iterator[CheckpointReader]:
    """The same checkpoint in our format, converted inside `folder` if need be."""
    if isinstance(reader, CheckpointReader):
        yield reader
        return
    with tempfile.TemporaryDirectory(dir=folder, prefix=".convert.") as name:
        convert_checkpoint(reader.path, Path(name) / "ours", progress=False)
        yield open_checkpoint(Path(name) / "ours")


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

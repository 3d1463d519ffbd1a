"""Finished layers of a partition on disk, so that a killed run goes on after them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.core.checks import OutputError
from moe_edge.core.files import write_text

SETTINGS = "settings.json"


def check_settings(work_dir: Path, settings: dict[str, Any]) -> None:
    """Makes the folder, or refuses one of other settings.

    Raises:
      OutputError: it holds layers made with other settings, or cannot be read.
    """
    path = work_dir / SETTINGS
    if path.is_file():
        try:
            before = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise OutputError(f"{path} is no JSON; remove {work_dir}") from error
        # As JSON gives them back: tuples become lists.
        now = json.loads(json.dumps(settings))
        differ = [name for name in now if before.get(name) != now[name]]
        if differ:
            raise OutputError(
                f"{work_dir} holds layers made with another {', '.join(differ)}; "
                "remove it or name another folder"
            )
    work_dir.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(settings, indent=1) + "\n")


def _paths(work_dir: Path, layer: int) -> tuple[Path, Path]:
    return work_dir / f"labels_{layer:03}.npy", work_dir / f"experts_{layer:03}.json"


def write_layer(work_dir: Path, layer: int, labels_EF, rows: list[dict]) -> None:
    """Labels first: the report's presence says that the layer is finished."""
    labels_path, rows_path = _paths(work_dir, layer)
    np.save(labels_path, labels_EF, allow_pickle=False)
    write_text(rows_path, json.dumps(rows) + "\n")


def read_layer(work_dir: Path, layer: int) -> tuple[np.ndarray, list[dict]] | None:
    """Labels int16 [E, F] and rows of a finished layer; None if there is none."""
    labels_path, rows_path = _paths(work_dir, layer)
    if not rows_path.is_file():
        return None
    try:
        labels_EF = np.load(labels_path, allow_pickle=False)
        return labels_EF, json.loads(rows_path.read_text("utf-8"))
    except (OSError, ValueError, EOFError):
        return None

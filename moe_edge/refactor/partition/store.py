"""Finished layers of a partition on disk, so that a killed run goes on after them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.core.checks import OutputError, check_shape
from moe_edge.core.files import write_text
from moe_edge.core.npy import load_npy
from moe_edge.refactor.partition.objective import check_labels

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
        if not isinstance(before, dict):
            raise OutputError(f"{path} holds no settings; remove {work_dir}")
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


def write_layer(
    work_dir: Path, layer: int, labels_EF, rows: list[dict], seconds: float
) -> None:
    """Labels first: the report's presence says that the layer is finished.

    Args:
      seconds: that the layer took.
    """
    labels_path, rows_path = _paths(work_dir, layer)
    np.save(labels_path, labels_EF, allow_pickle=False)
    stored = {"seconds": seconds, "experts": rows}
    write_text(rows_path, json.dumps(stored) + "\n")


def read_layer(
    work_dir: Path, layer: int, experts: int, neurons: int, subs: int
) -> tuple[np.ndarray, list[dict], float] | None:
    """Labels int16 [E, F], rows and seconds of a finished layer.

    None if there is none, or if it is damaged: it is made again.
    """
    labels_path, rows_path = _paths(work_dir, layer)
    try:
        stored = json.loads(rows_path.read_text("utf-8"))
        rows, seconds = stored["experts"], float(stored["seconds"])
        labels_EF = load_npy(labels_path)
        check_shape("labels", labels_EF, (experts, neurons))
        for labels_F in labels_EF:
            check_labels(labels_F, neurons, subs)
        if [row["expert"] for row in rows] != list(range(experts)):
            return None
    except (OSError, ValueError, EOFError, TypeError, KeyError, AttributeError):
        return None
    return labels_EF, rows, seconds

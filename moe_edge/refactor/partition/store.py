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


class LayerStore:
    """The folder `work_dir`: labels and rows of each finished layer."""

    def __init__(self, work_dir: Path, experts: int, neurons: int, subs: int):
        self._dir, self._shape, self._subs = work_dir, (experts, neurons), subs

    def begin(self, settings: dict[str, Any]) -> None:
        """Makes the folder, or refuses one that holds layers of other settings."""
        path = self._dir / SETTINGS
        if path.is_file():
            try:
                before = json.loads(path.read_text("utf-8"))
                differ = [n for n in settings if before.get(n) != settings[n]]
            except (ValueError, AttributeError) as error:
                raise OutputError(
                    f"{path} holds no settings; remove {self._dir}"
                ) from error
            if differ:
                raise OutputError(
                    f"{self._dir} holds layers made with another {', '.join(differ)}; "
                    "remove it or name another folder"
                )
        self._dir.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(settings, indent=1) + "\n")

    def _paths(self, layer: int) -> tuple[Path, Path]:
        names = f"labels_{layer:03}.npy", f"experts_{layer:03}.json"
        return self._dir / names[0], self._dir / names[1]

    def write(self, layer: int, labels_EF, rows: list[dict], seconds: float) -> None:
        """Labels first: the rows' presence says that the layer is finished."""
        labels_path, rows_path = self._paths(layer)
        np.save(labels_path, labels_EF, allow_pickle=False)
        stored = {"seconds": seconds, "experts": rows}
        write_text(rows_path, json.dumps(stored) + "\n")

    def read(self, layer: int) -> tuple[np.ndarray, list[dict], float] | None:
        """Labels int16 [E, F], rows and seconds; None if absent or damaged."""
        labels_path, rows_path = self._paths(layer)
        E, F = self._shape
        try:
            stored = json.loads(rows_path.read_text("utf-8"))
            rows, seconds = stored["experts"], float(stored["seconds"])
            labels_EF = load_npy(labels_path)
            check_shape("labels", labels_EF, (E, F))
            for labels_F in labels_EF:
                check_labels(labels_F, F, self._subs)
            if [row["expert"] for row in rows] != list(range(E)):
                return None
        except (OSError, ValueError, EOFError, TypeError, KeyError, AttributeError):
            return None
        return labels_EF, rows, seconds

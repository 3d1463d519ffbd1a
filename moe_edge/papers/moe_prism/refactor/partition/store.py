"""Finished layers of a partition on disk, so that a killed run goes on after them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.core.checks import OutputError
from moe_edge.core.files import write_text
from moe_edge.core.json_reader import LARGE_FILE_BYTES, read_json
from moe_edge.papers.moe_prism.refactor.partition.objective import check_labels

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
                before = read_json(path, strict=False)
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

    def _path(self, layer: int) -> Path:
        return self._dir / f"layer_{layer:03}.json"

    def write(self, layer: int, labels_EF, rows: list[dict], seconds: float) -> None:
        """Keeps a finished layer."""
        stored = {"labels": labels_EF.tolist(), "experts": rows, "seconds": seconds}
        write_text(self._path(layer), json.dumps(stored) + "\n")

    def read(self, layer: int) -> tuple[np.ndarray, list[dict], float] | None:
        """Labels int16 [E, F], rows and seconds; None if absent or damaged."""
        E, F = self._shape
        try:
            stored = read_json(
                self._path(layer), strict=False, max_bytes=LARGE_FILE_BYTES
            )
            rows, labels_EF = stored["experts"], np.array(stored["labels"])
            for labels_F in labels_EF:
                check_labels(labels_F, F, self._subs)
            if [row["expert"] for row in rows] != list(range(E)) or len(labels_EF) != E:
                return None
            return labels_EF.astype(np.int16), rows, float(stored["seconds"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

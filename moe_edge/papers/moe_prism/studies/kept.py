"""Measured points on disk: a study that was stopped goes on behind them."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from moe_edge.convert.open import open_checkpoint
from moe_edge.engine.base import Engine
from moe_edge.metrics.machine import git_state
from moe_edge.papers.moe_prism.studies import quality
from moe_edge.papers.moe_prism.studies.models import ModelSettings
from moe_edge.papers.moe_prism.studies.quality import Point


@dataclasses.dataclass(frozen=True)
class Kept:
    """Points in a folder, each in a file named by all that it depends on.

    Attributes:
      folder: where; None keeps none, since sources that no commit holds may change.
      commit: of the sources.
      checkpoints: name of a model -> its content_sha256.
    """

    folder: Path | None
    commit: str | None
    checkpoints: Mapping[str, str]

    @classmethod
    def of(cls, settings: ModelSettings) -> "Kept":
        """Those in the work folder of a study of these models."""
        git = git_state()
        known = git["commit"] is not None and git["dirty"] is False
        folder = Path(settings.work_dir) / "points" if known else None
        paths = settings.checkpoints() if known else {}
        found = {n: open_checkpoint(p).content_sha256() for n, p in paths.items()}
        return cls(folder, git["commit"], found)

    def point(
        self, name: str, k: int, engine: Engine, texts: Sequence[Sequence[int]]
    ) -> Point:
        """`quality.measure` of a model at its K, or what was measured before."""
        if self.folder is None:
            return quality.measure(engine, texts)
        path = self.folder / f"{self._hash(name, k, texts)}.npz"
        if path.is_file():
            with np.load(path) as stored:
                nats = np.split(stored["nats"], stored["ends"])
            return Point(quality.active_neurons(engine.config), nats)
        point = quality.measure(engine, texts)
        self.folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            ends = np.cumsum([len(row_T) for row_T in point.nats])[:-1]
            np.savez(file, nats=np.concatenate(point.nats), ends=ends)
        os.replace(part, path)  # appears as a whole
        return point

    def _hash(self, name: str, k: int, texts: Sequence[Sequence[int]]) -> str:
        """Of commit, model, K and tokens."""
        facts = [self.commit, name, self.checkpoints[name], k, [*map(list, texts)]]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

"""Writes a profile layer by layer under a temporary name that outlives a kill.

The work folder `.NAME.profiling` stands next to the place of the profile and holds its
files, and in `scratch/` the hidden states of all calibration tokens: those before the
current layer are only read, those after it only written. A run that is killed therefore
starts again at the layer it was in, from the very bytes that the killed run had read.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moe_edge.core.checks import ConfigError, OutputError
from moe_edge.core.files import (
    check_out_dir,
    locked_folder,
    write_text,
)
from moe_edge.core.json_reader import read_json
from moe_edge.core.out_folder import atomic_folder
from moe_edge.predict.probe import FOLDER as PROBES
from moe_edge.predict.probe import neurons_path, probe_path
from moe_edge.profile.space import allocate

PROGRESS_NAME = "progress.json"
PROFILE_NAME, COUNTS_NAME = "profile.json", "counts.jsonl"
EXPERT_FOLDERS = ("activations", "weights", "ranks")
HIDDEN = "hidden"  # one more of them, where it is asked for
COACTIVATION = "coactivation"
SCRATCH = "scratch"


def expert_path(folder: Path, kind: str, layer: int, expert: int) -> Path:
    """File of one expert; `kind` is one of EXPERT_FOLDERS, or HIDDEN."""
    return folder / kind / f"{layer:03d}_{expert:03d}.npy"


def coactivation_path(folder: Path, layer: int) -> Path:
    """File of one layer's [E, E] counts."""
    return folder / COACTIVATION / f"{layer:03d}.npy"


class ProfileWriter:
    """The work folder of one run.

    Attributes:
      folder: the work folder.
      next_layer: where the run goes on: 0 in a fresh folder.
      reports: what `finish_layer` was given so far, by layer.
    """

    def __init__(self, out_dir: Path, facts: dict, resume: bool):
        """Use through `open_writer`."""
        self.folder = work_folder(out_dir)
        self._facts, self._out_dir = facts, out_dir
        stored = self._progress() if resume else None
        if stored is not None and stored["facts"] != facts:
            done = len(stored["layers"])
            raise OutputError(
                f"{self.folder} holds {done} layer(s) of an unfinished profile with "
                f"other settings ({_differences(stored['facts'], facts)}); give the "
                "same to go on, --noresume to discard it, or another --out_dir"
            )
        if stored is None:
            self._clear()
            stored = {"layers": {}}
        self.reports = {int(layer): r for layer, r in stored["layers"].items()}
        self.next_layer = len(self.reports)
        folders = [HIDDEN] * facts.get("hidden", False)
        folders += [PROBES] * (facts.get("probes", 0) > 0)
        self._folders = (*EXPERT_FOLDERS, *folders, COACTIVATION)
        for name in (*self._folders, SCRATCH):
            (self.folder / name).mkdir(exist_ok=True)

    def _progress(self) -> dict | None:
        """What an earlier run noted, if the states it goes on from are there."""
        try:
            stored = read_json(self.folder / PROGRESS_NAME, strict=False)
        except ConfigError:
            return None
        is_there = self._scratch_path(f"states_{len(stored['layers']) % 2}").is_file()
        return stored if is_there else None

    def _scratch_path(self, name: str) -> Path:
        return self.folder / SCRATCH / f"{name}.npy"

    def _clear(self) -> None:
        (self.folder / PROGRESS_NAME).unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)

    def scratch(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A float32 array in a file, with what it held if it is there.

        Raises:
          CapacityError: the disk is full.
        """
        path = self._scratch_path(name)
        mode = "r+" if path.is_file() else "w+"
        given = (np.float32, shape) if mode == "w+" else ()
        array = np.lib.format.open_memmap(path, mode, *given)
        allocate(path)
        return array

    def states(self, layer: int, shape: tuple[int, ...]) -> np.ndarray:
        """States before a layer, float32 [N, W, D]; two files take turns."""
        return self.scratch(f"states_{layer % 2}", shape)

    def write_expert(self, layer: int, expert: int, **arrays: np.ndarray) -> None:
        """Writes one expert's arrays; names are those of `expert_path`."""
        for kind, array in arrays.items():
            np.save(expert_path(self.folder, kind, layer, expert), array)

    def write_probe(self, layer: int, target: int, rows_EC, neurons_NX) -> None:
        np.save(probe_path(self.folder, layer, target), rows_EC)
        np.save(neurons_path(self.folder, layer, target), neurons_NX)

    def write_coactivation(self, layer: int, both_EE: np.ndarray) -> None:
        np.save(coactivation_path(self.folder, layer), both_EE)

    def finish_layer(self, layer: int, report: dict | None) -> None:
        """Notes that a layer's files and the states after it are complete.

        Args:
          report: kept for the end of the run; None for a dense layer.
        """
        self.reports[layer] = report
        known = {"facts": self._facts, "layers": self.reports}
        write_text(self.folder / PROGRESS_NAME, json.dumps(known))
        self.next_layer = layer + 1

    def finish(self, files: dict[str, str], overwrite: bool) -> None:
        """Adds text files by name and moves the profile to its place."""
        with atomic_folder(self._out_dir, overwrite) as final:
            for name, text in files.items():  # first: a full disk loses no layer
                (final / name).write_text(text, encoding="utf-8")
            # From here on a kill means a new run, not half of this one.
            (self.folder / PROGRESS_NAME).unlink()
            for name in self._folders:
                (self.folder / name).rename(final / name)
        shutil.rmtree(self.folder, ignore_errors=True)


def _differences(there: dict, now: dict) -> str:
    """Facts that differ, as `name: old there, new now`."""
    return "; ".join(
        f"{name}: {_short(there.get(name))} there, {_short(now.get(name))} now"
        for name in dict.fromkeys((*there, *now))
        if there.get(name) != now.get(name)
    )


def _short(value) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = [f"{Path(file['path']).name} {file['sha256'][:6]}" for file in value]
    shown = str(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def work_folder(out_dir: Path) -> Path:
    """Where a profile is built until it is complete."""
    return out_dir.with_name(f".{out_dir.name}.profiling")


@contextlib.contextmanager
def open_writer(
    out_dir: str | Path, facts: dict, *, overwrite: bool, resume: bool
) -> Iterator[ProfileWriter]:
    """The work folder of a run, locked against a second run.

    Args:
      out_dir: where the profile will be.
      facts: what the profile depends on.
      overwrite: whether an earlier profile may be replaced at the end.
      resume: go on with unfinished work; False discards it.
    Raises:
      OutputError: out_dir is not free, cannot be written, another run writes it, or
        unfinished work there has other facts.
    """
    out_dir = check_out_dir(out_dir, overwrite)
    with locked_folder(work_folder(out_dir), str(out_dir)):
        yield ProfileWriter(out_dir, facts, resume)

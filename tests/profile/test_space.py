"""A run that would fill the disk is refused; what it maps has its place there."""

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CapacityError
from moe_edge.profile import space
from moe_edge.profile.writer import ProfileWriter, open_writer, work_folder
from tests.support.profiles import profile
from tests.support.slow_cases import slow


def disk_with(monkeypatch, free):
    found = SimpleNamespace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: found)


def test_full_disk_is_refused_before_the_run(tiny, two, tmp_path, monkeypatch):
    disk_with(monkeypatch, 1000)
    with pytest.raises(CapacityError, match=r"needs 0.000\d+ GiB .*--tokens"):
        profile(tmp_path / "p", tiny, two)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "more", [{}, *slow({"hidden": True, "probes": 1, "probe_neurons": 8})]
)
def test_need_bounds_what_is_written(more, tiny, two, tmp_path, monkeypatch):
    written = {}

    def look(self, files, overwrite):
        for name in ("scratch", "."):
            paths = [p for p in (self.folder / name).rglob("*.npy")]
            written[name] = sum(path.stat().st_size for path in paths)
        raise KeyboardInterrupt

    monkeypatch.setattr(ProfileWriter, "finish", look)
    with pytest.raises(KeyboardInterrupt):
        profile(tmp_path / "p", tiny, two, max_tokens_per_expert=20, **more)
    states = np.load(next(work_folder(tmp_path / "p").rglob("states_0.npy")))
    N, W, _ = states.shape
    config = open_checkpoint(tiny).config
    scratch, kept = space.needed_bytes(config, N, W, 20, **more)
    files = 3 + more.get("probes", 0)
    assert written["scratch"] == scratch + files * space.HEADER
    arrays = written["."] - written["scratch"]
    probes = list((work_folder(tmp_path / "p") / "probes").glob("*.npy"))
    bare = space.needed_bytes(config, N, W, 20, more.get("hidden", False))[1]
    assert sum(path.stat().st_size for path in probes) * 2 == kept - bare
    assert 0.7 * kept < arrays <= kept
    # The folder counts as there already: a run that goes on needs no second place.
    disk_with(monkeypatch, kept // 2)
    with pytest.raises(CapacityError, match="more below"):
        space.check_space(tmp_path / "elsewhere", scratch, kept)
    space.check_space(work_folder(tmp_path / "p"), scratch, kept)


def test_scratch_has_no_holes(tmp_path):
    with open_writer(tmp_path / "p", {}, overwrite=False, resume=True) as writer:
        array = writer.scratch("hidden", (64, 1024))
        path = Path(array.filename)
        assert path.stat().st_blocks * 512 >= array.nbytes
        os.truncate(path, 128)  # a hole again, as a killed run may leave it
        os.truncate(path, 128 + array.nbytes)
        writer.scratch("hidden", (64, 1024))
        assert path.stat().st_blocks * 512 >= array.nbytes


def test_disk_that_fills_meanwhile_is_an_error_not_a_signal(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with (
        open_writer(tmp_path / "p", {}, overwrite=False, resume=True) as writer,
        pytest.raises(CapacityError, match=r"hidden\.npy .*No space left"),
    ):
        writer.scratch("hidden", (4, 4))

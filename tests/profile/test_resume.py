"""A killed run goes on where it was; nothing unfinished is lost unasked."""

import numpy as np
import pytest

from moe_edge.core.checks import OutputError
from moe_edge.profile import activations
from moe_edge.profile.writer import ProfileWriter, open_writer, work_folder
from tests.support.profiles import contents, profile


def test_killed_run_goes_on_to_the_same_bytes(tiny, two, tmp_path, monkeypatch, capsys):
    whole = profile(tmp_path / "whole", tiny, two)
    loads, load = [], activations.LayerPrograms.load
    write = ProfileWriter.write_coactivation

    def count_loads(self, layer):
        loads.append(layer)
        load(self, layer)

    def kill_once(self, layer, both_EE):
        if layer == 1 and "killed" not in loads:
            loads.append("killed")  # states and activations of the layer are there
            raise KeyboardInterrupt
        write(self, layer, both_EE)

    monkeypatch.setattr(activations.LayerPrograms, "load", count_loads)
    monkeypatch.setattr(ProfileWriter, "write_coactivation", kill_once)
    with pytest.raises(KeyboardInterrupt):
        profile(tmp_path / "cut", tiny, two)
    kept = f"unfinished work is kept in {work_folder(tmp_path / 'cut')}"
    assert kept in capsys.readouterr().err
    assert not (tmp_path / "cut").exists() and work_folder(tmp_path / "cut").is_dir()
    again = profile(tmp_path / "cut", tiny, two)
    assert loads == [0, 1, "killed", 1]  # layer 0 was not run again
    assert not work_folder(tmp_path / "cut").exists()
    assert contents(again.path) == contents(whole.path)


@pytest.fixture
def cut_short(tiny, two, tmp_path, monkeypatch):
    """Starts a profile that is killed after its first layer."""

    def kill(self, layer, report):
        finish(self, layer, report)
        raise KeyboardInterrupt

    finish = ProfileWriter.finish_layer
    with monkeypatch.context() as patch:
        patch.setattr(ProfileWriter, "finish_layer", kill)
        with pytest.raises(KeyboardInterrupt):
            profile(tmp_path / "p", tiny, two)
    return tmp_path / "p"


def test_other_settings_are_refused_and_nothing_is_lost(cut_short, tiny, two):
    before = contents(work_folder(cut_short))
    with pytest.raises(
        OutputError, match=r"1 layer.s. .*\(seeds: \[0\] there, \[9\] now"
    ):
        profile(cut_short, tiny, two, seed=9)
    with pytest.raises(OutputError, match=r"files: .*b\.txt.*; give .*--noresume"):
        profile(cut_short, tiny, two.split(",")[0])
    assert contents(work_folder(cut_short)) == before
    profile(cut_short, tiny, two, seed=9, resume=False)
    assert not work_folder(cut_short).exists()


@pytest.mark.slow
def test_other_batch_size_goes_on(cut_short, tiny, two, tmp_path, capsys):
    found = profile(cut_short, tiny, two, batch_size=1)
    err = capsys.readouterr().err
    assert "going on at layer 1" in err
    whole = profile(tmp_path / "whole", tiny, two)
    np.testing.assert_array_equal(found.counts_NLE, whole.counts_NLE)


def test_second_run_into_the_same_folder_is_refused(tiny, two, tmp_path):
    with (
        open_writer(tmp_path / "p", {}, overwrite=False, resume=True),
        pytest.raises(OutputError, match="another run"),
    ):
        profile(tmp_path / "p", tiny, two)

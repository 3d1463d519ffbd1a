"""Suite `large` at a size of seconds, and its refusals."""

import pickle

import pytest

from moe_edge.bench.speed import SuiteSettings
from moe_edge.core.checks import CapacityError
from moe_edge.studies.speed import large, models


@pytest.fixture
def tiny(monkeypatch):
    shape = models.olmoe_config(2, "bfloat16", experts=9, hidden=64, heads=2)
    monkeypatch.setattr(large, "SHAPE", shape | {"vocab_size": 61})
    monkeypatch.setattr(large, "SPAN", 1 << 20)
    monkeypatch.setattr(large, "PROMPT", 40)
    # In this process: another would not see the small shape.
    monkeypatch.setattr(large, "alone", lambda function, *args: function(*args))


@pytest.mark.slow
def test_ours_and_the_peer_are_measured_in_turn(tiny, tmp_path, monkeypatch):
    asked = []

    def theirs(file):
        asked.append(file)
        return large.Measured(2.0, 50.0, build="peer 1")

    monkeypatch.setattr(large, "installed", lambda *names: True)
    monkeypatch.setattr(large, "write_gguf", lambda hf, folder, kind: folder / kind)
    monkeypatch.setattr(large, "_llama_cpp", theirs)
    decode, prefill = large.large_rows(SuiteSettings(repeats=2), tmp_path)
    assert decode["case"] == "decode/olmoe_7b_bfloat16/batch1"
    assert prefill["case"] == "prefill/olmoe_7b_bfloat16/512"
    assert asked == [tmp_path / large.GGUF / "BF16"] * 3  # once to warm up
    assert decode["runs"]["peer"] == [2.0, 2.0] and decode["peer_build"] == "peer 1"
    assert prefill["ratio"] == pytest.approx(prefill["ours"] / 50.0)
    # Of a layer: q, k, v, o, router and norms; 8 experts of 3 x 64 x 32. The head.
    layer = 2 * (4 * 64 * 64 + 9 * 64 + 8 * 3 * 64 * 32)
    norms = decode["bytes_per_step"] - 2 * layer - 2 * 61 * 64
    assert 0 < norms <= 4 * 2 * 4 * 64  # two layers' four vectors, widened
    reading_s = decode["bytes_per_step"] / max(decode["bandwidth_bytes_per_s"].values())
    assert decode["limit_fraction"] == pytest.approx(decode["ours"] * reading_s)
    monkeypatch.setattr(large, "installed", lambda *names: False)
    rows = large.large_rows(SuiteSettings(repeats=1), tmp_path)
    assert all(row["peer"] is None and row["ours"] > 0 for row in rows)


def test_what_a_process_gets_and_gives_travels():
    for sent in (large._ours, large._llama_cpp, large.write_gguf):
        assert pickle.loads(pickle.dumps(sent)) is sent
    found = large.Measured(2.0, 50.0, 7.0, "peer 1")
    assert pickle.loads(pickle.dumps(found)) == found


def test_a_machine_without_room_is_refused(tmp_path, monkeypatch):
    both = large.NAME, large.GGUF
    monkeypatch.setattr(large, "ram_bytes", lambda: 8e9)
    with pytest.raises(CapacityError, match=r"takes 19\.4 GB of memory.* 8\.0 GB"):
        large.check_machine(tmp_path, both)
    monkeypatch.setattr(large, "ram_bytes", lambda: 64e9)
    free = large.shutil.disk_usage(tmp_path)._replace(free=20e9)
    monkeypatch.setattr(large.shutil, "disk_usage", lambda folder: free)
    with pytest.raises(CapacityError, match=r"takes 27\.7 GB of disk.* 20\.0 GB"):
        large.check_machine(tmp_path, both)
    large.check_machine(tmp_path, (large.NAME,))  # without a peer half of it is made
    (tmp_path / large.NAME).mkdir()  # half of it is there already
    large.check_machine(tmp_path, both)

import dataclasses

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError, OutputError
from moe_edge.workload.trace_reader import read_trace
from moe_edge.workload.trace_writer import write_trace
from moe_edge.workload.traces import TraceRecorder
from tests.support.traces import make_trace


def random_trace(with_scores=True):
    rng = np.random.default_rng(0)
    recorder = TraceRecorder(num_experts=6, top_k=2)
    for step in range(5):
        for layer in (1, 3):
            scores_TE = rng.random((3, 6), np.float32)
            ids_TK = np.argsort(-scores_TE, axis=1)[:, :2]
            ids_TK[2, 1] = 6  # a token with one expert
            recorder.add(
                int(step > 1),
                step,
                layer,
                ids_TK,
                rng.random((3, 2), np.float32),
                rng.random((3, 2)) < 0.5,
                bytes=int(rng.integers(10**12)),
                wait_s=float(np.float32(rng.random())),
                scores_TE=scores_TE if with_scores else None,
                request_T=[0, 1, 2],
            )
    return recorder.trace()


def assert_same(a, b):
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        assert (x is None) == (y is None), field.name
        if x is not None:
            np.testing.assert_array_equal(x, y, err_msg=field.name)


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_write_trace_is_read_back_whole(tmp_path, name):
    trace = random_trace()
    write_trace(tmp_path / "new" / name, trace, with_scores=True)
    assert_same(read_trace(tmp_path / "new" / name), trace)
    assert {p.name for p in (tmp_path / "new").iterdir()} == {name, "scores.npz"}


def test_write_trace_says_experts_and_columns(tmp_path):
    write_trace(tmp_path / "t.csv", random_trace())
    lines = (tmp_path / "t.csv").read_text().splitlines()
    assert lines[0] == "# num_experts=6 top_k=2"
    assert lines[1] == "request,phase,step,layer,rank,expert,weight,hit,bytes,wait_s"
    assert not (tmp_path / "scores.npz").exists()
    write_trace(tmp_path / "u.csv", make_trace([(1, 0, 0, [2])]))
    lines = (tmp_path / "u.csv").read_text().splitlines()
    assert lines[1:] == ["request,phase,step,layer,rank,expert,weight", "0,1,0,0,0,2,1"]


def test_read_trace_ignores_scores_of_another_trace(tmp_path):
    write_trace(tmp_path / "t.csv", random_trace(), with_scores=True)
    write_trace(tmp_path / "u.csv", make_trace([(1, 0, 0, [2])]))
    assert read_trace(tmp_path / "u.csv").scores_TE is None


def test_read_trace_rejects_damaged_scores(tmp_path):
    write_trace(tmp_path / "t.csv", random_trace(), with_scores=True)
    with np.load(tmp_path / "scores.npz") as file:
        crc, scores_TE = file["ids_crc32"], file["scores"]
    np.savez(tmp_path / "scores.npz", ids_crc32=crc, scores=scores_TE[1:])
    with pytest.raises(ConfigError, match=r"float16 \(29, 6\), expected .*\(30, 6\)"):
        read_trace(tmp_path / "t.csv")
    (tmp_path / "scores.npz").write_bytes(b"PK\x03\x04 broken")
    with pytest.raises(ConfigError, match="scores.npz cannot be read"):
        read_trace(tmp_path / "t.csv")


def test_write_trace_rejects_scores_that_were_not_recorded(tmp_path):
    with pytest.raises(ConfigError, match="scores were not recorded"):
        write_trace(tmp_path / "t.csv", random_trace(False), with_scores=True)


def test_write_trace_rejects_a_file_as_folder(tmp_path):
    (tmp_path / "f").write_text("mine")
    with pytest.raises(OutputError, match="t.csv cannot be written"):
        write_trace(tmp_path / "f" / "t.csv", random_trace())
    assert [p.name for p in tmp_path.iterdir()] == ["f"]

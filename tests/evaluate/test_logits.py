import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, OutputError, RequestError
from moe_edge.evaluate import logits
from moe_edge.evaluate.logits import check_logits_path, read_tokens, write_logits
from tests.support.table_engine import TableEngine


@pytest.mark.parametrize("rows_in_memory", [1, 2, 8])
def test_write_logits_matches_reference(tmp_path, monkeypatch, rows_in_memory):
    engine = TableEngine(chunk=4)
    tokens = np.random.default_rng(0).integers(0, 11, (3, 10))
    monkeypatch.setattr(logits, "LOGITS_BYTES", 4 * 10 * 11 * rows_in_memory)
    shape = write_logits(engine, tokens, tmp_path / "l.npz")
    with np.load(tmp_path / "l.npz") as file:
        assert file.files == ["logits"]
        stored = file["logits"]
    assert stored.shape == shape == (3, 10, 11)
    assert stored.dtype == np.float32
    np.testing.assert_array_equal(stored, engine.table_VV[tokens])
    assert [path.name for path in tmp_path.iterdir()] == ["l.npz"]


def test_write_logits_rejects_rows_beyond_context(tmp_path):
    with pytest.raises(CapacityError, match="65 tokens exceed .* context of 64"):
        write_logits(TableEngine(), np.zeros((1, 65), int), tmp_path / "l.npz")


def test_write_logits_failure_leaves_no_file(tmp_path):
    engine = TableEngine()
    engine.score = lambda rows: iter([(0, "no array")])
    with pytest.raises(Exception):  # noqa: B017  whatever an engine may raise
        write_logits(engine, np.zeros((1, 3), int), tmp_path / "l.npz")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "array, message",
    [
        (np.zeros((2, 3), np.float32), "holds float32, expected one integer array"),
        (np.zeros(3, np.int32), r"has shape \(3,\), expected \[B, S\]"),
        (np.zeros((2, 0), np.int32), r"has shape \(2, 0\)"),
    ],
)
def test_read_tokens_rejects_other_arrays(tmp_path, array, message):
    np.save(tmp_path / "t.npy", array)
    with pytest.raises(RequestError, match=message):
        read_tokens(tmp_path / "t.npy")


def test_read_tokens_rejects_pickle(tmp_path):
    np.save(tmp_path / "t.npy", np.asarray([{}], object), allow_pickle=True)
    with pytest.raises(RequestError, match="t.npy is no .npy file of integers"):
        read_tokens(tmp_path / "t.npy")


def test_read_tokens_rejects_text_file(tmp_path):
    (tmp_path / "t.npy").write_text("hello")
    with pytest.raises(RequestError, match="t.npy is no .npy file"):
        read_tokens(tmp_path / "t.npy")


def test_check_logits_path_rejects_existing_file(tmp_path):
    path = tmp_path / "l.npz"
    path.write_text("")
    with pytest.raises(OutputError, match="l.npz exists; add --overwrite"):
        check_logits_path(path, overwrite=False)
    assert check_logits_path(path, overwrite=True) == path


def test_check_logits_path_rejects_other_ending_and_missing_folder(tmp_path):
    with pytest.raises(OutputError, match="l.npy must end in .npz"):
        check_logits_path(tmp_path / "l.npy", overwrite=False)
    with pytest.raises(OutputError, match="gone of the logits file does not exist"):
        check_logits_path(tmp_path / "gone" / "l.npz", overwrite=False)


def test_read_tokens_header_beyond_the_file_is_refused(tmp_path):
    path = tmp_path / "t.npy"
    np.save(path, np.zeros((2, 3), np.int64))
    text = path.read_bytes()
    assert b"(2, 3)" in text
    path.write_bytes(text.replace(b"(2, 3), }        ", b"(10000000, 999)}"[:17]))
    with pytest.raises(RequestError, match=f"{path} is no .npy file of integers"):
        read_tokens(path)

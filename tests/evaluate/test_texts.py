import json

import datasets
import pytest

from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.evaluate.texts import (
    find_file,
    find_path,
    read_dataset,
    read_text,
    sha256_of,
)

ROWS = {"text": ["one two", "three"], "n": [1, 2]}


def read(name, split="test", column="text", limit=None):
    return read_dataset(str(name), split=split, column=column, config=None, limit=limit)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The same rows in every form that can be read without a network."""
    folder = tmp_path_factory.mktemp("data")
    rows = datasets.Dataset.from_dict(ROWS)
    rows.save_to_disk(folder / "rows")
    datasets.DatasetDict({"test": rows}).save_to_disk(folder / "dict")
    lines = [json.dumps({"text": t, "n": 0}) for t in ROWS["text"]]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    (folder / "rows.txt").write_text("one two\nthree\n")
    (folder / "rows.csv").write_text("text,n\none two,1\nthree,2\n")
    rows.to_parquet(folder / "rows.parquet")
    return folder


@pytest.mark.parametrize(
    "name", ["rows", "dict", "rows.jsonl", "rows.txt", "rows.csv", "rows.parquet"]
)
def test_read_dataset_joins_rows_by_an_empty_line(saved, name):
    assert read(saved / name) == "one two\n\nthree"


def test_read_dataset_limit_keeps_the_first_rows(saved):
    assert read(saved / "rows", limit=1) == "one two"


def test_read_dataset_rejects_unknown_split(saved):
    with pytest.raises(ConfigError, match="no split 'dev'; known: test"):
        read(saved / "dict", split="dev")


def test_read_dataset_rejects_unknown_column(saved):
    with pytest.raises(ConfigError, match="no column 'body'; known: text, n"):
        read(saved / "rows.jsonl", column="body")


def test_read_dataset_rejects_column_of_numbers(saved):
    with pytest.raises(RequestError, match="row 0: 'n' is 1, expected a text"):
        read(saved / "rows.parquet", column="n")


def test_read_dataset_rejects_other_folder_and_ending(saved, tmp_path):
    with pytest.raises(ConfigError, match="is no data set of `save_to_disk`"):
        read(tmp_path)
    (tmp_path / "a.doc").write_text("x")
    with pytest.raises(ConfigError, match="ends in '.doc'; known: .txt"):
        read(tmp_path / "a.doc")


def test_read_dataset_missing_file_is_named_without_asking_the_hub(tmp_path):
    with pytest.raises(ConfigError, match="none.jsonl does not exist"):
        read(tmp_path / "none.jsonl")


def test_read_dataset_hub_out_of_reach_is_one_error(monkeypatch):
    def refuse(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(ConfigError, match="'squad' is no local .* no network"):
        read("squad")


def test_read_text_rejects_bytes_and_empty_file(tmp_path):
    path = tmp_path / "t.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(
        RequestError, match="t.txt is not UTF-8 text: byte 0 is 0xff; save it as UTF-8"
    ):
        read_text(path)
    path.write_text(" \n")
    with pytest.raises(RequestError, match="t.txt is empty"):
        read_text(path)


def test_find_path_looks_below_data_dir_when_there_is_none_here(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    assert find_path("a.txt", str(tmp_path)) == str(tmp_path / "a.txt")
    assert find_path("b.txt", str(tmp_path)) == "b.txt"
    assert find_path("a.txt", None) == "a.txt"


def test_find_file_that_is_missing_names_data_dir(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    assert find_file("a.txt", str(tmp_path)) == str(tmp_path / "a.txt")
    message = "b.txt is not here and no --data_dir was given; name the folder"
    with pytest.raises(FileNotFoundError, match=message):
        find_file("b.txt", None)
    with pytest.raises(FileNotFoundError, match=f"not here nor in {tmp_path}; name"):
        find_file("b.txt", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="/no/b.txt does not exist; check the"):
        find_file("/no/b.txt", None)


def test_sha256_of_golden(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256_of(tmp_path / "a").startswith("ba7816bf8f01cfea")


def test_read_dataset_broken_file_is_refused_in_one_line(tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(RequestError, match=f"data set {path} cannot be read"):
        read_dataset(str(path), split="train", column="text", config=None, limit=None)

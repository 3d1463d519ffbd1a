"""Files become domains, and domains equal shares of windows."""

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.profile.calibration import parse_files, read_calibration


class Letters:
    """One token a character."""

    def encode(self, text, end=True):
        return [ord(c) for c in text]


@pytest.fixture
def texts(tmp_path):
    sizes = {"a.txt": 100, "b.txt": 30, "c.txt": 7, "odd:name.txt": 5}
    for i, (name, size) in enumerate(sizes.items()):
        (tmp_path / name).write_text(chr(ord("k") + i) * size)
    return tmp_path


def read(texts, text, window=8, tokens=None):
    files = parse_files(text, str(texts))
    return read_calibration(files, Letters(), window, tokens)


def test_names_come_from_the_flag_or_the_file(texts):
    files = parse_files("a.txt, web:b.txt,web:c.txt,odd:name.txt", str(texts))
    assert [f.domain for f in files] == ["a", "web", "web", "odd:name"]


def test_windows_are_cut_and_padded_file_by_file(texts):
    found = read(texts, "b.txt,x:c.txt,x:odd:name.txt")
    assert found.domains == ("b", "x") and found.num_tokens == 30 + 7 + 5
    assert found.valid_NW.sum(axis=1).tolist() == [8, 8, 8, 6, 7, 5]
    assert found.domain_N.tolist() == [0, 0, 0, 0, 1, 1]
    assert found.domain_T.tolist() == [0] * 30 + [1] * 12
    assert set(found.tokens_NW[4][:7]) == {ord("m")} and found.tokens_NW[4][7] == 0
    assert [f["tokens"] for f in found.files] == [30, 7, 5]


def test_tokens_are_shared_by_domains_then_by_files(texts):
    found = read(texts, "a.txt,x:b.txt,x:c.txt", tokens=48)
    assert [f["tokens"] for f in found.files] == [24, 12, 7]  # c is shorter


def test_long_tokens_read_as_much_as_they_need(texts):
    class Rows(Letters):
        def encode(self, text, end=True):
            return [1] * (len(text) // 50)  # far longer than assumed

    files = parse_files("a.txt", str(texts))
    assert read_calibration(files, Rows(), 4, 2).num_tokens == 2


@pytest.mark.parametrize("tokens", [1, 3])
def test_fewer_tokens_than_files_are_refused(texts, tokens):
    with pytest.raises(ConfigError, match=f"tokens {tokens} are too few .*least 4"):
        read(texts, "a.txt,x:b.txt,x:c.txt", tokens=tokens)
    assert read(texts, "a.txt,x:b.txt,x:c.txt", tokens=4).num_tokens == 4


@pytest.mark.parametrize("text", ["a.txt,a.txt", "a.txt,x:./a.txt", "a.txt,link.txt"])
def test_a_file_twice_is_refused(texts, text):
    (texts / "link.txt").symlink_to(texts / "a.txt")
    with pytest.raises(ConfigError, match="given twice"):
        parse_files(text, str(texts))


def test_tokenised_text_is_read_as_prose(texts):
    (texts / "w.txt").write_text(" = Ab = \n\n It cost 1 @,@ 000 , he said . \n")
    ids = read(texts, "w.txt", window=64).tokens_NW[0, :26]
    assert "".join(map(chr, ids)) == "Ab\nIt cost 1,000, he said."


@pytest.mark.parametrize("text", ["", " , ", "no.txt", "x:no.txt", ":a.txt", "a.txt,z"])
def test_missing_text_is_refused(texts, text):
    with pytest.raises(ConfigError, match="calibration text"):
        parse_files(text, str(texts))


def test_empty_and_undecodable_text_is_refused(texts):
    (texts / "e.txt").write_text(" \n")
    (texts / "l.txt").write_bytes(b"\xff\xfe\xfa")
    for name in ("e.txt", "l.txt"):
        with pytest.raises(RequestError, match=name):
            read(texts, name)
    assert np.array_equal(read(texts, "c.txt").valid_NW, np.arange(8)[None] < 7)

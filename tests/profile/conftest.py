"""Texts and a checkpoint for the tests of the profiler."""

import pytest

from tests.support.tiny_checkpoint import TEXT, write_tiny_checkpoint


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two domains of unequal length."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "a.txt").write_text(TEXT * 2)
    (folder / "b.txt").write_text(TEXT[:90][::-1])
    return f"{folder / 'a.txt'},web:{folder / 'b.txt'}"

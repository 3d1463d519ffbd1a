"""Cleaning and splitting of training text."""

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.training import text


def test_split_documents_tail_is_held_out_and_nothing_lost():
    documents = ["a" * 100, "b" * 100]
    train, held_out = text.split_documents(documents)
    assert train == ["a" * 100, "b" * 90]
    assert held_out == ["b" * 10]


def test_source_documents_rejects_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"training text .*c4_web.txt is missing"):
        text.source_documents(text.SOURCES[2], tmp_path)


def test_stdlib_documents_are_bounded_python_without_tests():
    documents = text.stdlib_documents(50_000)
    assert 50_000 <= sum(map(len, documents)) < 250_000
    assert any("import " in document for document in documents)


def test_sources_shares_sum_to_the_text_part():
    assert sum(source.share for source in text.SOURCES) == pytest.approx(0.72)

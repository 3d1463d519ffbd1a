"""Which cases of a table plain pytest runs."""

import pytest

from tests.support.slow_cases import slow, slow_but


def test_all_cases_but_those_that_are_kept_are_slow():
    kept, moved = slow_but([("a", 1)], [("a", 1), ("b", 2)])
    assert kept == ("a", 1) and moved.values == ("b", 2)
    assert [mark.name for mark in moved.marks] == ["slow"]
    assert [case.values for case in slow("a", (1, 2))] == [("a",), (1, 2)]


def test_a_case_that_is_kept_must_be_there():
    with pytest.raises(ValueError, match=r"the table lacks \['olmo'\]"):
        slow_but(["olmo"], ["olmoe"])

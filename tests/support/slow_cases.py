"""Cases of a table that the slow tests run, where others show the behaviour at once."""

from collections.abc import Iterable

import pytest


def slow(*cases) -> list:
    """These cases, for the slow tests; a case of several arguments is a tuple."""
    several = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*case, marks=pytest.mark.slow) for case in several]


def slow_but(kept: Iterable, cases: Iterable) -> list:
    """A table whose cases are slow tests, but for those that are kept in plain pytest.

    Raises:
      ValueError: a case is kept that the table does not have.
    """
    kept, cases = list(kept), list(cases)
    if lacking := [case for case in kept if case not in cases]:
        raise ValueError(f"the table lacks {lacking}, which plain pytest is to run")
    return [case if case in kept else slow(case)[0] for case in cases]

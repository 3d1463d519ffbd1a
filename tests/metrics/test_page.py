"""Words of a page: what is no difference, of changes and of ratios."""

import pytest

from moe_edge.metrics.page import cell, ranged, say
from moe_edge.metrics.ranged import NO_DIFFERENCE, Ranged, formatted

NEAR, FAR = Ranged(1.04, 0.98, 1.1), Ranged(1.3, 1.2, 1.4)


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (NEAR, "x.2f", NO_DIFFERENCE),
        (NEAR, ".2f", "1.04"),
        (NEAR - 1, "+.0%", NO_DIFFERENCE),
        (FAR, "x.2f", "1.30"),
        (FAR - 1, "+.0%", "+30%"),
        (Ranged(1.0, 1.0, 1.0), "x.2f", NO_DIFFERENCE),
        (1.04, "x.2f", "1.04"),
        (1.04, "+.2f", "+1.04"),
    ],
)
def test_a_ratio_whose_interval_holds_1_is_no_difference(value, form, text):
    assert formatted(value, form) == text
    assert (
        say([{"name": "a", "over": value}], f"{{name}} {{over:{form}}}") == f"a {text}"
    )


def test_rows_take_an_interval_from_bounds_a_spread_or_that_of_another_measure():
    rows = [{"gain": 0.1, "low": -0.1, "high": 0.2, "over": 1.1, "over_spread": 0.05}]
    (by_bounds,) = ranged(rows, "gain", "low", "high")
    assert f"{by_bounds['gain']:+.0%}" == NO_DIFFERENCE
    (by_other,) = ranged(rows, "gain", of="over")
    assert f"{by_other['gain']:+.0%}" == "+10%"
    assert by_other["gain"].low == pytest.approx(0.05)
    (by_spread,) = ranged(rows, "over")
    assert say([by_spread], "{over:x.1f} {over.low:.2f}") == "1.1 1.05"
    (kept,) = ranged([by_bounds], "gain", of="over")
    assert kept["gain"] is by_bounds["gain"]
    assert rows[0]["gain"] == 0.1 and not isinstance(rows[0]["gain"], Ranged)


def test_a_cell_of_a_ratio_inside_its_spread_shows_how_wide_that_is():
    row = {"over": 1.04, "over_spread": 0.05, "over_n": 3}
    assert cell(row, "over", "x.2f") == "no difference ± 0.05"
    assert cell(row, "over", ".2f") == "1.04 ± 0.05"
    assert cell(row | {"over": 1.2}, "over", "x.2f") == "1.20 ± 0.05"

"""Words of a page: what is no difference, of changes and of ratios."""

import pytest

from moe_edge.metrics.filters import alike, level, ranged, say
from moe_edge.metrics.page import cell
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


def test_rows_take_an_interval_from_their_bounds_or_those_of_another_measure():
    row = {"change": 0.1, "change_low": -0.1, "change_high": 0.2, "gain": 0.1}
    rows = [row | {"over": 1.1, "over_low": 1.05, "over_high": 1.3}]
    (by_bounds,) = ranged(rows, "change")
    assert f"{by_bounds['change']:+.0%}" == NO_DIFFERENCE
    (by_other,) = ranged(rows, "gain", of="over")
    assert f"{by_other['gain']:+.0%}" == "+10%"
    assert by_other["gain"].low == pytest.approx(0.05)
    assert by_other["gain"].high == pytest.approx(0.3)
    (own,) = ranged(rows, "over")
    assert say([own], "{over:x.1f} {over.low:.2f} {over.high:.2f}") == "1.1 1.05 1.30"
    (kept,) = ranged([by_other], "gain", of="over")
    assert kept["gain"] is by_other["gain"]
    (bare,) = ranged([{"over": 1.1}], "over")
    assert bare["over"].low == bare["over"].high == 1.1
    assert rows[0]["gain"] == 0.1 and not isinstance(rows[0]["gain"], Ranged)


def test_a_cell_of_a_ratio_inside_its_spread_shows_how_wide_that_is():
    row = {"over": 1.04, "over_low": 0.99, "over_high": 1.09, "over_n": 3}
    assert cell(row, "over", "x.2f") == "no difference ± 0.05"
    assert cell(row, "over", ".2f") == "1.04 ± 0.05"
    apart = {"over": 1.2, "over_low": 1.1, "over_high": 1.2}
    assert cell(row | apart, "over", "x.2f") == "1.20 ± 0.05"


def test_rows_whose_ratio_to_the_best_is_no_difference_are_alike():
    rows = [
        {"system": name, "over": over}
        for name, over in {
            "best": Ranged(1.0, 0.9, 1.0),
            "near": NEAR,
            "far": FAR,
        }.items()
    ]
    assert alike(rows, "over") == [rows[1]]
    assert alike([{"over": 1.0}, {"over": 1.01}], "over") == []  # without starts


def test_rows_whose_bounds_overlap_those_of_the_best_are_level_with_it():
    rows = [
        {"case": name, "speed": speed, "speed_low": low, "speed_high": high}
        for name, speed, low, high in (
            *(("a", 0.7, 0.68, 0.72), ("b", 0.66, 0.6, 0.69)),
            *(("c", 0.6, 0.55, 0.67), ("d", 0.5, 0.3, 0.68)),
        )
    ]
    assert [row["case"] for row in level(rows, rows[0], "speed")] == ["b", "d"]
    plain = [{"case": name, "speed": speed} for name, speed in (("a", 2.0), ("b", 1.0))]
    assert level(plain, plain[0], "speed") == []

"""The choice of a on curves whose answer is known."""

import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.papers.smoe.choose_a import choose_a

A_N = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])


def test_choose_a_on_a_line_is_exact():
    choice = choose_a(A_N, 0.10 - 0.08 * A_N, 0.08, degree=1)
    assert choice.a == pytest.approx(0.25)
    assert choice.predicted_tpot_s == pytest.approx(0.08)
    assert choice.coefficients == pytest.approx((0.10, -0.08))
    assert choice.max_residual_s < 1e-12


def test_choose_a_on_a_parabola_takes_its_first_crossing():
    # Falls to 0.06 at a = 0.3 and rises again: meets 0.07 at 0.2 and at 0.4.
    choice = choose_a(A_N, 0.06 + (A_N - 0.3) ** 2, 0.07)
    assert choice.a == pytest.approx(0.2)


def test_choose_a_within_the_budget_already_is_the_smallest_measured():
    choice = choose_a(A_N + 0.05, 0.10 - 0.08 * A_N, 0.2)
    assert choice.a == 0.05 and choice.predicted_tpot_s == pytest.approx(0.10)
    assert choice.is_certain


def test_choose_a_at_the_best_reachable_budget_is_the_largest():
    assert choose_a(A_N, 0.10 - 0.08 * A_N, 0.06, degree=1).a == pytest.approx(0.5)
    flat = choose_a(A_N, np.full(6, 0.1), 0.1 + 1e-9)
    assert flat.a == 0.0


def test_choose_a_reports_the_worst_residual():
    # Residuals of a line through +-d, alternating: known by least squares.
    noise = 0.001 * np.array([1, -1, 1, -1, 1, -1])
    choice = choose_a(A_N, 0.10 - 0.08 * A_N + noise, 0.08, degree=1)
    slope, at_zero = np.polyfit(A_N, 0.10 - 0.08 * A_N + noise, 1)
    residual = np.abs(at_zero + slope * A_N - (0.10 - 0.08 * A_N + noise)).max()
    assert choice.max_residual_s == pytest.approx(residual) and residual > 5e-4
    assert not choice.is_certain


def test_choose_a_uses_repeated_measurements():
    choice = choose_a([0, 0, 0.2, 0.4], [0.11, 0.09, 0.08, 0.06], 0.09, degree=1)
    assert choice.a == pytest.approx(0.1)
    assert choice.max_residual_s == pytest.approx(0.01)


@pytest.mark.parametrize(
    "tpot_s_N, best",
    [
        (0.10 - 0.08 * A_N, r"0\.06 s at a = 0\.5:"),
        (0.06 + (A_N - 0.3) ** 2, r"0\.06 s at a = 0\.3:"),
    ],
)
def test_choose_a_rejects_budget_that_no_a_meets(tpot_s_N, best):
    message = rf"no a in \[0, 0\.5\] meets 0\.05 s per token; the best is {best}"
    with pytest.raises(CapacityError, match=message):
        choose_a(A_N, tpot_s_N, 0.05)


@pytest.mark.parametrize(
    "points, tpot, message",
    [
        ([0, 0.1, 0.1], [3, 2, 1], "2 distinct a are too few .* degree 2, .* least 4"),
        ([0, 0.1], [1], r"a has shape \(2,\) and TPOT \(1,\)"),
        ([0, 1.0], [1, 2], "point 1 is a = 1 with 2 s a token"),
        ([0, -0.2], [1, 2], "point 1 is a = -0.2 with"),
        ([0, 0.2], [float("nan"), 2], "point 0 is a = 0 with nan s a token"),
        ([0, 0.2], [1, float("inf")], "point 1 is a = 0.2 with inf"),
        ([0, 0.2], [1, 0.0], "point 1 is a = 0.2 with 0 s"),
    ],
)
def test_choose_a_rejects_points(points, tpot, message):
    with pytest.raises(ConfigError, match=message):
        choose_a(points, tpot, 0.1)


def test_choose_a_rejects_budget_and_degree():
    with pytest.raises(ConfigError, match="budget_tpot_s must be positive, got nan"):
        choose_a(A_N, 0.10 - 0.08 * A_N, float("nan"))
    with pytest.raises(ConfigError, match="degree of the fit must be .* got 0"):
        choose_a(A_N, 0.10 - 0.08 * A_N, 0.1, degree=0)


def test_choose_a_exact_line_has_an_accurate_crossing():
    # Of a line, the quadratic coefficient is rounding noise: its roots must not be
    # those of an ill-conditioned polynomial.
    a_N = np.repeat((0.0, 0.2, 0.4, 0.6), 3)
    choice = choose_a(a_N, 0.02 - 0.01 * a_N, 0.017)
    assert choice.a == pytest.approx(0.3, abs=1e-9)

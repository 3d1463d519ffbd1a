import numpy as np
import pytest

from moe_edge.core import checks


def test_check_shape_accepts_wildcard():
    checks.check_shape("x_TD", np.zeros((3, 4)), (None, 4))


def test_check_shape_rejects_other_size():
    with pytest.raises(
        checks.ConfigError, match=r"x_TD has shape \(3, 4\), expected \(3, 5\)"
    ):
        checks.check_shape("x_TD", np.zeros((3, 4)), (3, 5))


def test_check_shape_rejects_other_rank():
    with pytest.raises(checks.ConfigError, match=r"expected \(3,\)"):
        checks.check_shape("x_TD", np.zeros((3, 4)), (3,))


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_check_positive_rejects_zero_negative_nan(value):
    with pytest.raises(checks.ConfigError, match=f"rate must be positive, got {value}"):
        checks.check_positive("rate", value)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_check_from_zero_rejects_negative_nan_infinite(value):
    checks.check_from_zero("rate", 0)
    with pytest.raises(checks.ConfigError, match=f"rate must be 0 or more.*{value}"):
        checks.check_from_zero("rate", value)


def test_check_known_lists_alternatives():
    with pytest.raises(checks.ConfigError, match="unknown policy 'x'; known: lfu, lru"):
        checks.check_known("policy", "x", ("lru", "lfu"))


def test_errors_are_value_errors():
    assert issubclass(checks.CapacityError, ValueError)

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest

from moe_edge.core import checks, typed


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


def test_check_positive_rejects_infinity():
    with pytest.raises(checks.ConfigError, match="rate must be finite, got inf"):
        checks.check_positive("rate", float("inf"))


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_check_from_zero_rejects_negative_nan_infinite(value):
    checks.check_from_zero("rate", 0)
    with pytest.raises(checks.ConfigError, match=f"rate must be 0 or more.*{value}"):
        checks.check_from_zero("rate", value)


def test_check_known_lists_alternatives():
    with pytest.raises(checks.ConfigError, match="unknown policy 'x'; known: lfu, lru"):
        checks.check_known("policy", "x", ("lru", "lfu"))
    with pytest.raises(checks.ConfigError, match="'lruu'; did you mean 'lru'. known"):
        checks.check_known("policy", "lruu", ("lru", "lfu"))
    with pytest.raises(checks.ConfigError, match="unknown option 'x'; known: none$"):
        checks.check_known("option", "x", ())


def test_errors_are_value_errors():
    assert issubclass(checks.CapacityError, ValueError)


@dataclasses.dataclass
class Options:
    rate: float = 1.0
    rows: int = 2
    limit: float | None = None
    is_on: bool = False
    shape: tuple[int, ...] = ()
    free: object = None
    shares: Mapping[str, float] | None = None
    deep: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)


GOOD = [
    *({"rate": 2}, {"rate": np.float32(0.5)}, {"rows": np.int64(3)}, {"limit": None}),
    *({"limit": 3}, {"limit": 0.5}, {"is_on": True}, {"shape": (1, 2)}),
    *({"free": True}, {"free": "x"}),
    *({"shares": {"a": 1, "b": 0.5}}, {"shares": {}}, {"deep": {"a": {"b": 1}}}),
]


@pytest.mark.parametrize("options", GOOD)
def test_build_known_takes_options_of_their_type(options):
    built = typed.build_known("thing", {"x": Options}, "x", options)
    assert built == Options(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": "fast"}, "x: rate is 'fast', expected a number"),
        ({"rows": 2.5}, "x: rows is 2.5, expected a whole number"),
        ({"rows": True}, "x: rows is True, expected a whole number"),
        ({"rows": None}, "x: rows is None, expected a whole number"),
        ({"limit": "1"}, r"x: limit is '1', expected a number or None"),
        ({"limit": False}, "x: limit is False"),
        ({"is_on": 1}, "x: is_on is 1, expected True or False"),
        ({"shares": {"a": 1, "b": "2"}}, "x: shares: 'b' is '2', expected a number$"),
        ({"shares": {"a": True}}, "x: shares: 'a' is True, expected a number$"),
        ({"shares": {1: 2.0}}, r"x: shares is {1: 2.0}, expected options"),
        ({"deep": {"a": {"b": None}}}, "x: deep: 'a': 'b' is None, expected a whole"),
        ({"deep": {"a": 3}}, "x: deep: 'a' is 3, expected options"),
        ({"colour": 1}, "x has no option 'colour'; known: rate, rows"),
    ],
)
def test_build_known_refuses_other_types_and_names(options, message):
    with pytest.raises(checks.ConfigError, match=message):
        typed.build_known("thing", {"x": Options}, "x", options)

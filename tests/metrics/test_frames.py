"""Rows in frames: what is refused, stored and read again."""

import math

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.metrics.frames import (
    OF_ROUNDS,
    Rows,
    frame,
    interval,
    median,
    plain,
    table,
)

FRAMES = {"timing": frame("policy batch", tpot_ms="ms", ratio="1")}


def test_rows_are_read_as_they_were_added():
    rows = Rows(FRAMES)
    rows("timing", "lru", 1, tpot_ms=median([1.0, 2.0, 4.0], scale=10), ratio=0.5)
    rows("timing", policy="lfu", batch=3, ratio=interval(0.9, (0.8, 0.95), 72))
    stored = rows.stored()["timing"]
    assert stored["bounds"] == {"tpot_ms": OF_ROUNDS, "ratio": "95 % interval"}
    first, second = plain(table(stored))
    assert first == {
        **{"policy": "lru", "batch": 1, "tpot_ms": 20.0, "tpot_ms_n": 3},
        **{"tpot_ms_low": 10.0, "tpot_ms_high": 40.0},
        **{"ratio": 0.5, "ratio_n": 1, "ratio_low": 0.5, "ratio_high": 0.5},
    }
    assert "tpot_ms" not in second and second["ratio_n"] == 72
    assert (second["ratio_low"], second["ratio_high"]) == (0.8, 0.95)


@pytest.mark.parametrize(
    "name, row, message",
    [
        ("times", {}, "unknown frame 'times'; known: timing"),
        ("timing", {"policy": "a"}, r"lacks or adds \['batch'\], expected keys"),
        ("timing", {"policy": "a", "batch": 1, "ms": 1.0}, r"lacks or adds \['ms'\]"),
        (
            "timing",
            {"policy": "a", "batch": 1, "ratio": math.nan},
            "ratio .* is nan, not",
        ),
    ],
)
def test_rows_refuse_what_does_not_fit(name, row, message):
    with pytest.raises(ConfigError, match=message):
        Rows(FRAMES)(name, **row)

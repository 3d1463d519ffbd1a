"""Warm-up, plateau, decay."""

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.training.schedule import Schedule

SCHEDULE = Schedule(
    peak=1.0, warmup_tokens=10, train_tokens=100, decay_tokens=20, decay_minutes=5.0
)


def test_rate_golden():
    assert SCHEDULE.rate(4) == pytest.approx(0.5)
    assert SCHEDULE.rate(50) == 1.0
    assert SCHEDULE.rate(90) == pytest.approx(0.05 + 0.95 * 0.5)
    assert SCHEDULE.rate(100) == pytest.approx(0.05)


def test_rate_deadline_starts_the_decay_before_the_tokens_do():
    assert SCHEDULE.rate(50, minutes_left=60.0) == 1.0
    assert SCHEDULE.rate(50, minutes_left=1.0) == pytest.approx(0.05 + 0.95 * 0.2)
    assert SCHEDULE.left(50, minutes_left=-1.0) == 0.0


def test_schedule_rejects_decay_longer_than_run():
    with pytest.raises(ConfigError, match="decay_tokens 200 exceeds train_tokens 100"):
        Schedule(train_tokens=100, decay_tokens=200)


def test_schedule_rejects_zero_peak():
    with pytest.raises(ConfigError, match="peak must be positive, got 0"):
        Schedule(peak=0)

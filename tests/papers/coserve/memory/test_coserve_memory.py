"""The split of memory between experts and batches."""

import pytest

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.papers.coserve.memory.coserve_memory import decaying_window, pool_bytes


def test_pool_is_what_a_batch_leaves():
    assert pool_bytes("gpu", 100, 3, 10, 20) == 23
    message = (
        "4 gpu executors have 100 bytes; each needs 10 for a batch and 20 "
        "for the smallest expert: expected at least 120, or fewer executors"
    )
    with pytest.raises(CapacityError, match=message):
        pool_bytes("gpu", 100, 4, 10, 20)


def test_window_slides_until_the_throughput_falls_behind_its_trend():
    # Rises by one an expert up to 39, then falls: 15, 28, 39, 48, 56 experts are the
    # ends of windows of 15, 12.75, 10.8, 9.2 and 7.8.
    def throughput(experts):
        return float(experts if experts <= 39 else 78 - experts)

    found = decaying_window(throughput, most=100)
    assert [experts for experts, _ in found.tried] == [15, 28, 39, 48]
    assert (found.low, found.high) == (39, 48) and 39 <= found.chosen <= 48


def test_window_of_a_throughput_that_keeps_rising_ends_where_memory_ends():
    found = decaying_window(lambda experts: 10.0 + experts, most=40)
    assert found.tried[-1][0] == found.high == 40
    found = decaying_window(lambda experts: 1.0 + experts, most=5)
    assert (found.low, found.high, found.tried) == (0, 5, ((5, 6.0),))


def test_margin_says_how_far_behind_is_too_far():
    values = {15: 10.0, 28: 20.0, 39: 27.5, 48: 38.0}  # 30 was expected at 39
    values |= {experts: 50.0 for experts in range(49, 101)}
    assert decaying_window(values.__getitem__, 100, margin=0.05).high == 39
    assert decaying_window(values.__getitem__, 100, margin=0.1).high > 39


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"most": 0}, "most must be a positive whole number, got 0"),
        ({"most": 9, "start": 100}, "start is 100 and margin 0.05, expected 1 to 99"),
        ({"most": 9, "margin": 1.0}, "start is 15 and margin 1.0, expected"),
    ],
)
def test_wrong_window_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        decaying_window(lambda experts: 1.0, **given)

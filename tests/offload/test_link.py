import math
import time

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.offload.link import EmulatedLink, TransferLink, wait_until


class FakeTime:
    """A clock that only sleeping moves, in steps that overshoot as a kernel's do."""

    def __init__(self):
        self.now_s = 100.0

    def perf_counter(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds + 75e-6 if seconds else 1e-6


@pytest.fixture
def clock(monkeypatch):
    fake = FakeTime()
    monkeypatch.setattr("moe_edge.offload.link.time", fake)
    return fake


def test_real_link_copies_without_delay(clock):
    start_s, end_s, result = TransferLink().transfer(
        1 << 40, 99.0, lambda x: x, "copied"
    )
    assert (start_s, end_s, result) == (100.0, 100.0, "copied")
    assert TransferLink().describe() == {"emulated": False}


@pytest.mark.parametrize(
    ("num_bytes", "rate", "latency_s", "expected_s"),
    [(1000, 1e6, 0.0, 1e-3), (5000, 1e6, 2e-3, 7e-3), (0, 1e6, 4e-3, 4e-3)],
)
def test_emulated_rate_holds_within_ten_percent_in_real_time(
    num_bytes, rate, latency_s, expected_s
):
    link = EmulatedLink(rate, latency_s)
    assert link.seconds(num_bytes) == pytest.approx(expected_s)
    took = []
    for _ in range(100):  # the best one counts, for a busy machine delays
        begun_s = time.perf_counter()
        _, end_s, _ = link.transfer(num_bytes, begun_s, lambda: None)
        wait_until(end_s)
        took.append(time.perf_counter() - begun_s)
        if took[-1] <= expected_s * 1.1:
            break
    assert expected_s * (1 - 1e-9) <= min(took) <= expected_s * 1.1


def test_queued_transfers_follow_the_deadline_clock(clock):
    link, spans, begun = EmulatedLink(1e6), [], []
    for _ in range(10):
        link.rest()
        begun.append(clock.now_s)
        spans.append(link.transfer(2000, 100.0, lambda: clock.sleep(1e-4))[:2])
    starts, ends = zip(*spans, strict=True)
    assert starts == pytest.approx([100 + 2e-3 * i for i in range(10)], abs=1e-9)
    assert ends == pytest.approx([100.002 + 2e-3 * i for i in range(10)], abs=1e-9)
    # A thread that rests comes back before the link is free, but not long before.
    early = np.subtract(starts, begun)[1:]
    assert (early >= 0).all() and (early <= 100e-6).all()


def test_wait_until_lasts_until_then(clock):
    wait_until(100.002)
    assert clock.now_s == pytest.approx(100.002, abs=2e-6)
    wait_until(99.0)
    assert clock.now_s == pytest.approx(100.002, abs=2e-6)


def test_idle_time_is_not_saved_up(clock):
    link = EmulatedLink(1e6)
    link.transfer(1000, 100.0, lambda: None)
    start_s, end_s, _ = link.transfer(2000, 105.0, lambda: None)
    assert start_s == 105.0 and end_s == pytest.approx(105.002, abs=2e-6)


def test_copy_counts_inside_the_transfer(clock):
    link = EmulatedLink(1e6)
    start_s, end_s, _ = link.transfer(8000, 100.0, clock.sleep, 5e-3)
    assert end_s - start_s == pytest.approx(8e-3, abs=2e-6)


def test_copy_slower_than_the_link_occupies_it(clock):
    link = EmulatedLink(1e9)
    _, end_s, _ = link.transfer(1000, 100.0, clock.sleep, 5e-3)
    start_s, _, _ = link.transfer(1000, 100.0, lambda: None)
    assert start_s == pytest.approx(100.005075) and end_s == pytest.approx(start_s)


@pytest.mark.parametrize("rate", [0, -1.0, math.inf, math.nan])
def test_rejects_bad_rate(rate):
    with pytest.raises(ConfigError, match=f"link rate must be .* got {rate}"):
        EmulatedLink(rate)


@pytest.mark.parametrize("latency_s", [-1e-6, math.inf, math.nan])
def test_rejects_bad_latency(latency_s):
    with pytest.raises(ConfigError, match=f"link latency must be .* got {latency_s}"):
        EmulatedLink(1e6, latency_s)


def test_describe_says_emulated():
    described = EmulatedLink(2e9, 5e-5).describe()
    assert described == {"emulated": True, "bytes_per_s": 2e9, "latency_s": 5e-5}

"""Costs that explain what servers noted."""

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.hardware.cluster_calibration import Messages
from moe_edge.hardware.cluster_fit import (
    AnswerSeen,
    PassSeen,
    WaitSeen,
    fit_calibration,
    least_squares,
)

SIZES = Messages(
    base_s=0.0,
    each_s=0.0,
    bytes_per_s=1000.0,
    call_bytes=8,
    token_bytes=16,
    pair_bytes=4,
    row_bytes=16,
)
# (dense_s, split_s, call_s, block_s, pair_s) of two servers, in buckets of 1 and 16.
COSTS = {
    (0, 1): (1e-3, 2e-4, 3e-4, 0.0, 5e-5),
    (1, 1): (2e-3, 1e-4, 5e-4, 0.0, 7e-5),
    (0, 16): (3e-3, 4e-4, 6e-4, 2e-5, 1e-5),
    (1, 16): (4e-3, 5e-4, 7e-4, 4e-5, 3e-5),
}


def made_up(rng, count=40, without=()):
    """What these costs give, as they would be noted."""
    passes, answers, waits = [], [], []
    for (server, bucket), (dense, split, call, block, pair) in COSTS.items():
        if (server, bucket) in without:
            continue
        for _ in range(count):
            blocks = int(rng.integers(1, 9))
            pairs = blocks if bucket == 1 else blocks + int(rng.integers(0, 20))
            spent_s = call + blocks * block + pairs * pair
            answers.append(AnswerSeen(server, bucket, blocks, pairs, spent_s, 1))
            away = int(rng.integers(0, 7))
            took_s = 6 * dense + away * split + blocks * block + pairs * pair
            terms = (6, away, blocks, pairs, 1)
            passes.append(PassSeen(server, bucket, took_s, *terms))
            calls, num_bytes = int(rng.integers(1, 3)), int(rng.integers(40, 4000))
            over_s = 1e-4 + calls * 2e-4 + num_bytes * (1e-3 + 1e-4)
            waits.append(WaitSeen(calls, over_s, num_bytes, 1))
    return passes, answers, waits


def fit(seen):
    return fit_calibration(*seen, load_s=[0.5, 0.25], sizes=SIZES, source="test")


def test_costs_are_found_again_although_some_passes_were_disturbed():
    passes, answers, waits = made_up(np.random.default_rng(0))
    passes[3] = passes[3]._replace(seconds=9.0)
    answers[50] = answers[50]._replace(seconds=1.0)
    waits[7] = waits[7]._replace(seconds=waits[7].seconds + 0.04)
    found = fit((passes, answers, waits))
    for (server, bucket), expected in COSTS.items():
        costs = found.servers[server].buckets[(1, 16).index(bucket)]
        got = (
            *(costs.dense_s, costs.split_s, costs.call_s),
            *(costs.block_s, costs.pair_s),
        )
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-9)
    messages = found.messages
    np.testing.assert_allclose(
        [messages.base_s, messages.each_s, messages.bytes_per_s],
        [1e-4, 2e-4, 1 / (1e-3 + 1e-4)],
        rtol=1e-6,
    )
    # They are no cost, but they were waited for: a run's mean is what was seen.
    assert found.compute_slowdown[0] > 2 and found.message_slowdown[0] > 1.01
    assert [server.load_s for server in found.servers] == [0.5, 0.25]
    assert (messages.call_bytes, found.source) == (8, "test")


def slower(seen, rng, times, without=()):
    """The same while so many servers had requests as come by chance."""
    counts = [k for k in range(1, len(times) + 1) if k not in without]
    found = []
    for one in seen:
        busy = int(rng.choice(counts))
        line_s = one.num_bytes / 1000 if isinstance(one, WaitSeen) else 0.0
        seconds = line_s + (one.seconds - line_s) * times[busy - 1]
        found.append(one._replace(seconds=seconds, busy=busy))
    return found


def test_more_servers_with_requests_are_slower_together():
    rng = np.random.default_rng(4)
    passes, answers, waits = made_up(rng)
    waits = [w._replace(seconds=w.seconds - w.num_bytes * 1e-4) for w in waits]
    compute, message = [1.0, 1.5, 2.0, 2.5], [1.0, 2.0, 3.0, 4.0]
    seen = [slower(part, rng, compute, [3]) for part in (passes, answers)]
    found = fit((*seen, slower(waits, rng, message, [3])))
    np.testing.assert_allclose(found.compute_slowdown, compute, rtol=1e-3)
    np.testing.assert_allclose(found.message_slowdown, message, rtol=1e-3)
    assert found.servers[1].buckets[0].dense_s == pytest.approx(2e-3, rel=1e-3)
    assert found.messages.each_s == pytest.approx(2e-4, rel=1e-3)


def test_a_bucket_that_a_server_was_not_seen_in_costs_what_others_need():
    found = fit(made_up(np.random.default_rng(1), without=[(1, 16)]))
    first, second = (server.buckets[1] for server in found.servers)
    assert second == first and second.dense_s == pytest.approx(3e-3)


def test_a_cluster_without_calls_has_messages_that_cost_nothing():
    passes, _, _ = made_up(np.random.default_rng(2))
    alone = [p._replace(split=0) for p in passes]
    found = fit((alone, [], []))
    assert (found.messages.base_s, found.messages.each_s) == (0.0, 0.0)
    assert found.servers[0].buckets[0].call_s == 0.0


def test_costs_are_never_negative():
    terms_XC = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert least_squares(terms_XC, np.array([3.0, 2.0, 1.0])) == [2.0, 0.0]
    assert least_squares(terms_XC[:0], np.zeros(0)) == [0.0, 0.0]


def test_a_run_that_decoded_nothing_is_refused():
    passes, answers, waits = made_up(np.random.default_rng(3))
    prompts = [p for p in passes if p.bucket > 1]
    with pytest.raises(ConfigError, match=r"passes of buckets \[16\] were seen, ex"):
        fit((prompts, answers, waits))

"""Costs as a cluster was measured, bucket by bucket."""

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.hardware.cluster_calibration import (
    BucketCosts,
    ClusterCalibration,
    Messages,
    ServerCosts,
)
from moe_edge.hardware.cost_model import CallSizes
from moe_edge.hardware.measured_costs import MeasuredCosts
from moe_edge.place.call_costs import CallCosts
from moe_edge.place.migrate import remote_call_seconds

BUCKETS = [
    BucketCosts(tokens=1, dense_s=1.0, pair_s=0.25, head_s=3.0, call_s=0.5),
    BucketCosts(tokens=8, dense_s=2.0, pair_s=0.125, block_s=0.5, split_s=0.75),
]
FAST = BucketCosts(tokens=1, dense_s=0.5, pair_s=0.125)
MESSAGES = Messages(
    base_s=0.5,
    each_s=0.125,
    bytes_per_s=100.0,
    call_bytes=4,
    token_bytes=16,
    pair_bytes=4,
    row_bytes=20,
)
CALIBRATION = ClusterCalibration(
    servers=[
        ServerCosts(buckets=BUCKETS, load_s=2.0),
        ServerCosts(buckets=[FAST, BUCKETS[1]], load_s=4.0),
    ],
    messages=MESSAGES,
    source="test",
)
COSTS = MeasuredCosts.of(CALIBRATION, slots=[3, 5], block_bytes=768)


def test_a_step_costs_what_the_next_larger_bucket_costs():
    assert COSTS.stage(np.array([1, 2, 8, 9])).tolist() == [0, 1, 1, 1]
    assert [COSTS.dense_s(0, t) for t in (0, 1, 2, 8)] == [0, 1, 2, 2]
    assert COSTS.dense_s(0, np.array([9, 10, 16])).tolist() == [3, 4, 4]  # in chunks
    assert (COSTS.head_s(0, 1), COSTS.head_s(0, 5)) == (3.0, 0.0)
    assert (COSTS.split_s(0, 1), COSTS.call_s(0), COSTS.call_s(1)) == (0.75, 0.5, 0.0)


def test_a_block_costs_by_the_step_it_is_in():
    assert COSTS.compute_s(0, 0, np.array([0, 1, 4])).tolist() == [0, 0.25, 1.0]
    assert COSTS.compute_s(0, 0, 1, stage=1) == 0.625
    assert COSTS.compute_s(1, 0, 1) == 0.125


def test_slots_loads_and_messages_are_the_clusters():
    assert [int(s.sum()) for s in COSTS.cluster.slots(768)] == [3, 5]
    assert [COSTS.load_s(n, 0) for n in (0, 1)] == [2.0, 4.0]
    assert COSTS.call_sizes == CallSizes(call=4, state=16, pair=4, pair_row=20)
    assert COSTS.call_sizes.there(2, 3) == 4 + 32 + 12
    assert COSTS.call_sizes.back(2, 3) == 60


def test_placers_are_told_what_a_call_takes_with_its_software():
    # 20 bytes each way of 100 a second, 0.5 in messages, 0.125 to send; 0.5 for a call
    # of server 0.
    expected = [[0, 0.4 + 0.5 + 0.125 + 0.125], [0.4 + 0.5 + 0.125 + 0.5 + 0.25, 0]]
    np.testing.assert_allclose(CallCosts.of(COSTS).fixed_NM, expected)
    np.testing.assert_allclose(remote_call_seconds(COSTS), expected)


def test_slots_of_other_servers_are_refused():
    with pytest.raises(ConfigError, match="slots of 3 servers, the calibration is of"):
        MeasuredCosts.of(CALIBRATION, slots=[1, 2, 3], block_bytes=768)

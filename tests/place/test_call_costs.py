"""What calls cost, read off a cost model."""

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.hardware.specs import Link
from moe_edge.place.call_costs import Batch, CallCosts, views_of
from tests.place.support import cost_model

SLOW = Link(bytes_per_s=1e5, latency_s=2e-3, source="test")


def test_call_costs_of_two_servers_by_hand():
    model = cost_model(gpus=((1.0,), (1.0, 1.0)), links={(0, 1): SLOW})
    costs = CallCosts.of(model)
    # A hidden state is 8 values of 2 bytes; a block 192 bytes at 1e11 bytes/s.
    assert (costs.sizes.there(1, 2), costs.sizes.back(1, 2)) == (16, 16)
    assert costs.byte_NM[0, 1] == pytest.approx(1e-5)
    assert costs.byte_NM[1, 0] == pytest.approx(1e-6)
    assert costs.back_byte_NM[0, 1] == pytest.approx(1e-6 / 2)  # two GPUs answer apart
    assert costs.back_byte_NM[1, 0] == pytest.approx(1e-5)
    ways_s = 2e-3 + 16e-5 + 1e-3 + 16e-6
    assert costs.local_N[0] == pytest.approx(192e-11)
    assert costs.fixed_NM[0, 1] == pytest.approx(ways_s + 192e-11)
    assert costs.fixed_NM[0, 0] == 0
    assert costs.gpus_N.tolist() == [1, 2]
    assert costs.one_link
    assert not CallCosts.of(cost_model(sharing="pair")).one_link


def test_call_costs_further_tokens_follow_the_cost_model():
    model = cost_model()
    costs = CallCosts.of(model, tokens=101)
    more_s = costs.local_N[0] * (1 + 100 * costs.further_N[0])
    assert more_s == pytest.approx(model.compute_s(0, 0, 101))


def test_nearest_ties_go_to_the_next_in_the_ring():
    costs = CallCosts.of(cost_model(gpus=((1.0,),) * 4))
    assert costs.nearest().tolist() == [[1, 2, 3], [2, 3, 0], [3, 0, 1], [0, 1, 2]]


def test_nearest_slow_line_comes_last():
    links = {(0, 1): SLOW, (3, 0): SLOW}
    costs = CallCosts.of(cost_model(gpus=((1.0,),) * 4, links=links))
    assert costs.nearest()[0, 0] == 2
    assert costs.nearest()[3].tolist() == [1, 2, 0]


def test_views_join_callers_to_whom_all_look_alike():
    (view,) = views_of(CallCosts.of(cost_model(gpus=((1.0,),) * 4)))
    assert view.callers == [0, 1, 2, 3]
    assert view.class_N.tolist() == [0, 0, 0, 0]


def test_views_sort_holders_by_cost_and_keep_different_callers_apart():
    both = {(n, m): SLOW for n in range(4) for m in range(4) if 3 in (n, m) and n != m}
    fast, slow = views_of(CallCosts.of(cost_model(gpus=((1.0,),) * 4, links=both)))
    assert fast.callers == [0, 1, 2]
    assert fast.class_N.tolist() == [0, 0, 0, 1]
    assert fast.fixed_C[0] < fast.fixed_C[1]
    assert slow.callers == [3]
    assert slow.class_N[:3].tolist() == [0, 0, 0]


def test_batch_one_number_or_one_a_server():
    batch = Batch(5.0, (1.0, 2.0)).by_server(2)
    assert batch.tokens.ravel().tolist() == [5, 5]
    assert batch.per_request.ravel().tolist() == [1, 2]
    with pytest.raises(ConfigError, match="tokens has 3 numbers for 2 servers"):
        Batch(np.ones(3), 1.0).by_server(2)

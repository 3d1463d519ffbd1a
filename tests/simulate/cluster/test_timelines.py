"""Hand-computed timelines; the numbers of the tiny cluster are in its module."""

from moe_edge.schedule.full_batch import FullBatch
from tests.support.tiny_cluster import asked, constant_pools, placed, run, tiny_costs


def test_one_server_serves_in_order_of_arrival():
    # 2 layers of 1/2 + 1/4: a step takes 1.5 s. Request 0 needs two steps.
    pools = constant_pools(2, a=[[0], [1]])
    requests = asked((0, 0.0, 3, 2, "a"), (0, 1.0, 1, 1, "a"), (0, 10.0, 1, 1, "a"))
    loop, result = run(requests, placed([[0, 0], [0, 0]]), tiny_costs((1,)), pools)
    assert loop.finish_R.tolist() == [3.0, 4.5, 11.5]
    assert loop.first_R.tolist() == [1.5, 4.5, 11.5]
    assert result.latency_s_N == [(3.0 + 3.5 + 1.5) / 3]
    assert result.local_ratio == 1.0
    assert loop.events == 3 + 4 * 5  # a step: two stages a layer, and its end


def test_batch_admits_at_the_next_step():
    pools = constant_pools(2, a=[[0], [1]])
    requests = asked((0, 0.0, 3, 2, "a"), (0, 1.0, 1, 1, "a"), (0, 1.25, 1, 1, "a"))
    loop, _ = run(
        requests, placed([[0, 0], [0, 0]]), tiny_costs((1,)), pools, max_batch=2
    )
    assert loop.finish_R.tolist() == [3.0, 3.0, 4.5]


def test_remote_call_is_sent_queued_computed_and_returned():
    pools = constant_pools(2, a=[[1]])
    requests = asked((0, 0.0, 3, 2, "a"), (0, 0.25, 1, 1, "a"), (1, 0.75, 1, 1, "a"))
    loop, result = run(
        requests, placed([[0, -1]], [[-1, 0]]), tiny_costs((1, 1)), pools
    )
    # Request 0: dense .5, three states .375 + .0625 -> .9375; GPU 1 computes the dense
    # part of request 2 until 1.25, then the call until 1.5; back .4375 -> 1.9375.
    # Its second token: 2.4375, there 2.625, 2.875, back 3.0625.
    # Request 2: routed at 1.25, its own block behind the call: 1.5 to 1.75.
    # Request 1 after request 0: 3.5625, 3.75, 4.0, 4.1875.
    assert loop.first_R.tolist() == [1.9375, 4.1875, 1.75]
    assert loop.finish_R.tolist() == [3.0625, 4.1875, 1.75]
    assert result.bytes_NN["call"].tolist() == [[0, 80], [80, 0]]
    assert result.remote_calls == 3
    assert (result.local_pairs, result.pairs) == (1, 6)
    assert loop.links.gpu_busy == [1.5, 0.5 + 4 * 0.25]


def test_messages_share_a_line_and_two_gpus_compute_together():
    # Experts 0 and 1 on the two GPUs of server 1: two messages on one link.
    pools = constant_pools(2, a=[[0, 1]])
    requests = asked((0, 0.0, 1, 1, "a"), (0, 1.0, 1, 1, "a"), (0, 9.0, 1, 1, "a"))
    loop, _ = run(requests, placed([[-1, -1]], [[0, 1]]), tiny_costs((1, 2)), pools)
    # .5; there .6875 and .8125; computed .9375 and 1.0625; the link back is free at
    # 1.0625 for the second: 1.0625 + .125 + .0625 = 1.25.
    assert loop.finish_R.tolist() == [1.25, 2.5, 10.25]


def test_results_of_one_gpu_queue_for_the_other_caller():
    # Servers 0 and 2 call server 1 at once, each three states on a link of its own.
    pools = constant_pools(2, a=[[1]], b=[[0]])
    requests = asked((0, 0.0, 3, 1, "a"), (2, 0.0, 3, 1, "a"), (1, 0.25, 1, 1, "b"))
    placement = placed([[0, -1]], [[0, 0]], [[0, -1]])
    loop, _ = run(requests, placement, tiny_costs((1, 1, 1)), pools)
    # Both arrive at .9375. Server 1: dense .25 to .75, its own block .75 to 1.0; then
    # 1.0 to 1.25 and 1.25 to 1.5; back .4375 later.
    assert loop.finish_R.tolist() == [1.6875, 1.9375, 1.0]


def test_egress_line_is_shared_by_all_receivers():
    pools = constant_pools(2, a=[[0, 1]])
    requests = asked((0, 0.0, 2, 1, "a"), (0, 5.0, 2, 1, "a"), (0, 9.0, 2, 1, "a"))
    placement = placed([[-1, -1]], [[0, -1]], [[-1, 0]])
    own, _ = run(requests, placement, tiny_costs((1, 1, 1)), pools)
    shared, _ = run(requests, placement, tiny_costs((1, 1, 1), sharing="egress"), pools)
    # Apart: .5 + .25 + .0625, computed 1.0625, back .3125. Shared: the second message
    # leaves at .75 and everything of it is .25 later.
    assert own.finish_R.tolist() == [1.375, 6.375, 10.375]
    assert shared.finish_R.tolist() == [1.625, 6.625, 10.625]


def test_results_to_two_callers_share_the_egress_line():
    # Servers 0 and 2 each ask a GPU of server 1: both are computed at .9375.
    pools = constant_pools(2, a=[[0]], b=[[1]])
    requests = asked((0, 0.0, 1, 1, "a"), (2, 0.0, 1, 1, "b"), (0, 5.0, 1, 1, "a"))
    placement = placed([[-1, -1]], [[0, 1]], [[-1, -1]])
    gpus = (1, 2, 1)
    own, _ = run(requests, placement, tiny_costs(gpus), pools)
    shared, _ = run(requests, placement, tiny_costs(gpus, sharing="egress"), pools)
    assert own.finish_R.tolist() == [1.125, 1.125, 6.125]
    assert shared.finish_R.tolist() == [1.125, 1.25, 6.125]


def test_a_replica_on_the_server_itself_is_preferred():
    pools = constant_pools(2, a=[[1]])
    requests = asked((0, 0.0, 1, 1, "a"), (0, 1.0, 1, 1, "a"), (1, 2.0, 1, 1, "a"))
    loop, result = run(requests, placed([[0, 0]], [[-1, 0]]), tiny_costs((1, 1)), pools)
    assert loop.finish_R.tolist() == [0.75, 1.75, 2.75]
    assert result.remote_calls == 0


def test_callers_spread_over_equal_replicas():
    # Blocks 0 to 2 are on servers 1 and 3: server 0 asks 1, server 2 asks 3.
    pools = constant_pools(2, a=[[1]])
    requests = asked((0, 0.0, 1, 1, "a"), (2, 0.0, 1, 1, "a"), (0, 5.0, 1, 1, "a"))
    placement = placed([[0, -1]], [[0, 0]], [[0, -1]], [[0, 0]])
    loop, result = run(requests, placement, tiny_costs((1, 1, 1, 1)), pools)
    assert loop.finish_R.tolist() == [1.125, 1.125, 6.125]
    assert result.bytes_NN["call"].nonzero()[0].tolist() == [0, 1, 2, 3]


def test_a_policy_may_wait_for_a_full_batch():
    pools = constant_pools(2, a=[[0]])  # a step takes .75 s
    requests = asked(*((0, t, 1, 1, "a") for t in (0.0, 0.25, 2.0)))
    here = placed([[0, 0]])
    policy = FullBatch(2, max_wait_s=1.5)
    loop, _ = run(requests, here, tiny_costs((1,)), pools, schedule=policy)
    assert loop.finish_R.tolist() == [1.0, 1.0, 2.0 + 1.5 + 0.75]

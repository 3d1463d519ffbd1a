from moe_edge.offload.link import EmulatedLink
from moe_edge.simulate.replay.serial_link import ComputedQueue


def make_mover():
    return ComputedQueue(
        EmulatedLink(1.0, 1.0), block_bytes=3, num_experts=8
    )  # 4 s each


def test_mover_demand_overtakes_prefetch_but_interrupts_nothing():
    queue = make_mover()
    first = queue.request(0, 1, 0, "prefetch")
    second = queue.request(0, 2, 1, "prefetch")
    queue.now_s = 1.0
    queue.poll()
    demand = queue.request(0, 3, 2, "demand")
    assert queue.wait([demand]) == 7
    assert (first.done_s, demand.done_s, queue.now_s) == (4, 8, 8)
    assert second.done_s is None  # a demand made at this very moment goes first
    queue.now_s = 8.5
    queue.poll()
    assert (second.done_s, second.done) == (12, False)
    assert queue.begun == {"demand": 1, "prefetch": 2}


def test_mover_idles_until_asked():
    queue = make_mover()
    queue.now_s = 5.0
    assert queue.wait([queue.request(0, 0, 0, "demand")]) == 4
    assert queue.wait([]) == 0


def test_mover_promoted_prefetch_is_the_last_demand():
    queue = make_mover()
    right = queue.request(0, 1, 0, "prefetch")
    demand = queue.request(0, 2, 1, "demand")
    queue.promote(right)
    assert queue.wait([right]) == 8
    assert (demand.done_s, right.cause) == (4, "demand")
    queue.promote(demand)  # done: nothing to do
    assert queue.begun == {"demand": 2, "prefetch": 0}


def test_mover_takes_back_what_has_not_begun():
    queue = make_mover()
    running = queue.request(0, 1, 0, "prefetch")
    queue.request(0, 2, 1, "prefetch")
    other = queue.request(1, 2, 2, "prefetch")
    queue.now_s = 1.0
    queue.poll()
    assert queue.cancel_prefetches(lambda key: key >= 8) == [(0, 2, 1)]
    queue.wait([other])
    assert (running.done_s, other.done_s, queue.cancelled) == (4, 8, 1)
    assert queue.unused_blocks() == 2
    queue.used(running.key)
    queue.request(1, 3, 2, "demand")  # over the other one, which nothing used
    assert (queue.unused_blocks(), queue.wasted) == (0, 1)

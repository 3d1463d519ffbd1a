from moe_edge.offload.link import EmulatedLink
from moe_edge.simulate.serial_link import SerialMover


def make_mover():
    return SerialMover(EmulatedLink(1.0, 1.0), block_bytes=3, num_experts=8)  # 4 s each


def test_mover_demand_overtakes_prefetch_but_interrupts_nothing():
    mover = make_mover()
    first = mover.request(0, 1, 0, "prefetch")
    second = mover.request(0, 2, 1, "prefetch")
    mover.now_s = 1.0
    mover.poll()
    demand = mover.request(0, 3, 2, "demand")
    assert mover.wait([demand]) == 7
    assert (first.done_s, demand.done_s, mover.now_s) == (4, 8, 8)
    assert second.done_s is None  # a demand made at this very moment goes first
    mover.now_s = 8.5
    mover.poll()
    assert (second.done_s, second.done) == (12, False)
    assert mover.begun == {"demand": 1, "prefetch": 2}


def test_mover_idles_until_asked():
    mover = make_mover()
    mover.now_s = 5.0
    assert mover.wait([mover.request(0, 0, 0, "demand")]) == 4
    assert mover.wait([]) == 0


def test_mover_promoted_prefetch_is_the_last_demand():
    mover = make_mover()
    right = mover.request(0, 1, 0, "prefetch")
    demand = mover.request(0, 2, 1, "demand")
    mover.promote(right)
    assert mover.wait([right]) == 8
    assert (demand.done_s, right.cause) == (4, "demand")
    mover.promote(demand)  # done: nothing to do
    assert mover.begun == {"demand": 2, "prefetch": 0}


def test_mover_takes_back_what_has_not_begun():
    mover = make_mover()
    running = mover.request(0, 1, 0, "prefetch")
    mover.request(0, 2, 1, "prefetch")
    other = mover.request(1, 2, 2, "prefetch")
    mover.now_s = 1.0
    mover.poll()
    assert mover.cancel_prefetches(lambda key: key >= 8) == [(0, 2, 1)]
    mover.wait([other])
    assert (running.done_s, other.done_s, mover.cancelled) == (4, 8, 1)
    assert mover.unused_blocks() == 2
    mover.used(running.key)
    mover.request(1, 3, 2, "demand")  # over the other one, which nothing used
    assert (mover.unused_blocks(), mover.wasted) == (0, 1)

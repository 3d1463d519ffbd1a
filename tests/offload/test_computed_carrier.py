from moe_edge.offload.block_queue import BlockQueue
from moe_edge.offload.computed_carrier import ComputedCarrier
from moe_edge.offload.link import EmulatedLink


def make_queue():
    link = EmulatedLink(1.0, 1.0)
    return BlockQueue([ComputedCarrier(link, block_bytes=3, num_experts=8)])  # 4 s each


def at(queue, now_s):
    queue.carriers[0].now_s = now_s


def counts(queue):
    stats = queue.stats()
    return stats.demand.count, stats.prefetch.count


def test_demand_overtakes_prefetch_but_interrupts_nothing():
    queue = make_queue()
    first = queue.request(0, 1, 0, "prefetch")
    second = queue.request(0, 2, 1, "prefetch")
    at(queue, 1.0)
    queue.poll()
    demand = queue.request(0, 3, 2, "demand")
    assert queue.wait([demand]) == 7
    assert (first.arrival_s, demand.arrival_s, queue.carriers[0].now_s) == (4, 8, 8)
    assert second.state == "queued"  # a demand made at this very moment goes first
    at(queue, 8.5)
    queue.poll()
    assert (second.arrival_s, second.done) == (12, False)
    assert counts(queue) == (1, 2)


def test_idles_until_asked():
    queue = make_queue()
    at(queue, 5.0)
    assert queue.wait([queue.request(0, 0, 0, "demand")]) == 4
    assert queue.wait([]) == 0


def test_promoted_prefetch_is_the_last_demand():
    queue = make_queue()
    right = queue.request(0, 1, 0, "prefetch")
    demand = queue.request(0, 2, 1, "demand")
    queue.promote(right)
    assert queue.wait([right]) == 8
    assert (demand.arrival_s, right.cause) == (4, "demand")
    queue.promote(demand)  # done: nothing to do
    assert counts(queue) == (2, 0)


def test_takes_back_what_has_not_begun():
    queue = make_queue()
    running = queue.request(0, 1, 0, "prefetch")
    queue.request(0, 2, 1, "prefetch")
    other = queue.request(1, 2, 2, "prefetch")
    at(queue, 1.0)
    queue.poll()
    assert queue.cancel_prefetches(lambda key: key >= 8) == [(0, 2, 1)]
    queue.wait([other])
    assert (running.arrival_s, other.arrival_s, queue.stats().cancelled) == (4, 8, 1)
    assert queue.stats().unused_bytes == 2 * 3
    queue.used(running.key)
    queue.request(1, 3, 2, "demand")  # over the other one, which nothing used
    stats = queue.stats()
    assert (stats.unused_bytes, stats.wasted_bytes) == (0, 3)

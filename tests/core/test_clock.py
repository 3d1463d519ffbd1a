import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.core.clock import EventHeap


def test_events_come_in_order_of_time_then_of_entry():
    heap = EventHeap()
    heap.push(2.0, 1, 5, 6)
    heap.push(1.0, 2)
    heap.push(2.0, 0)
    assert len(heap) == 3
    assert [heap.pop() for _ in range(3)] == [
        (1.0, 2, 0, 0),
        (2.0, 1, 5, 6),
        (2.0, 0, 0, 0),
    ]
    assert (heap.now_s, len(heap)) == (2.0, 0)


@pytest.mark.parametrize("time_s", [0.5, float("nan")])
def test_an_event_in_the_past_is_refused(time_s):
    heap = EventHeap()
    heap.push(1.0, 0)
    heap.pop()
    with pytest.raises(ConfigError, match=f"kind 3 at {time_s} s, expected 1.0 s"):
        heap.push(time_s, 3)

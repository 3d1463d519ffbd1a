"""The timetable of a migration, by hand."""

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.hardware.specs import Link
from moe_edge.place.plan import Placement
from moe_edge.place.transfers import schedule
from tests.place.support import cost_model

# Servers 0 and 1 hold everything or something; server 2 gets blocks 0, 1, 2.
CURRENT = Placement(np.array([[[0, 0, 0, 0]], [[0, -1, -1, -1]], [[-1, -1, -1, 0]]]))
NEW = Placement(np.array([[[0, 0, 0, 0]], [[0, -1, -1, -1]], [[0, 0, 0, -1]]]))
CALLS = np.array([[[1.0] * 4], [[1.0] * 4], [[5.0, 9.0, 7.0, 1.0]]])
COPY_S = 192e-9  # host memory to GPU
LINK_S = 192e-6  # network, latency 1e-3


def test_schedule_from_host_memory_most_called_first():
    transfers = schedule(CURRENT, NEW, cost_model(), CALLS)
    assert [t.block for t in transfers] == [1, 2, 0]
    assert [t.source for t in transfers] == [2, 2, 2]
    np.testing.assert_allclose([t.ready_s for t in transfers], COPY_S * np.arange(1, 4))
    np.testing.assert_allclose([t.start_s for t in transfers], COPY_S * np.arange(3))


def test_schedule_over_the_network_uses_free_links():
    """Blocks 1 and 2 only come from server 0; block 0 from idle server 1."""
    transfers = schedule(CURRENT, NEW, cost_model(), CALLS, source="network")
    assert [(t.block, t.source) for t in transfers] == [(1, 0), (2, 0), (0, 1)]
    np.testing.assert_allclose(
        [t.start_s for t in transfers], [0, LINK_S, 0], atol=1e-12
    )
    ready = [1e-3 + LINK_S + COPY_S, 1e-3 + 2 * LINK_S + COPY_S]
    np.testing.assert_allclose([t.ready_s for t in transfers[:2]], ready)
    assert transfers[2].ready_s == pytest.approx(
        transfers[1].ready_s + COPY_S
    )  # its GPU's link is taken in the order of calls


def test_schedule_no_link_carries_two_blocks_at_once():
    rng = np.random.default_rng(0)
    held = rng.random((3, 4, 12)) < 0.5
    held[0] = True
    current = Placement(np.where(held, 0, -1))
    candidate = Placement(np.zeros((3, 4, 12), np.int8))
    calls = rng.random(held.shape)
    for sharing in ("egress", "pair"):
        model = cost_model(sharing=sharing)
        transfers = schedule(current, candidate, model, calls, source="network")
        assert len(transfers) == (~held).sum()
        links: dict = {}
        for t in transfers:
            link = t.source if sharing == "egress" else (t.source, t.server)
            links.setdefault(link, []).append((t.start_s, t.sent_s))
            assert held[t.source, t.layer, t.block]
        for spans in links.values():
            spans.sort()
            ends = [end for _, end in spans]
            assert all(
                s >= e - 1e-15 for (s, _), e in zip(spans[1:], ends, strict=False)
            )


def test_schedule_prefers_the_faster_link():
    slow = Link(bytes_per_s=1e3, latency_s=1e-3, source="test")
    model = cost_model(links={(1, 2): slow})
    transfers = schedule(CURRENT, NEW, model, CALLS, source="network")
    assert [t.source for t in transfers] == [0, 0, 0]


def test_schedule_block_that_nobody_holds_is_refused():
    current = Placement(np.array([[[0, -1]], [[0, -1]], [[0, -1]]]))
    candidate = Placement(np.array([[[0, 0]], [[0, -1]], [[0, -1]]]))
    calls = np.ones((3, 1, 2))
    with pytest.raises(ConfigError, match="no server holds block 1 of layer 0 now"):
        schedule(current, candidate, cost_model(), calls, source="network")
    assert len(schedule(current, candidate, cost_model(), calls)) == 1
    with pytest.raises(ConfigError, match="unknown source of blocks 'disk'"):
        schedule(current, candidate, cost_model(), calls, source="disk")

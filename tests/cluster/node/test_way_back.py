"""What a lost process says on its way back, over a connection by hand."""

import time

import pytest

from moe_edge.cluster.node import way_back
from moe_edge.cluster.node.way_back import WayBack
from tests.support.live_run import wait_until


class Scheduler:
    """A transport to one; keeps the numbers with which a process says `back`."""

    def __init__(self):
        self.heard, self.there = [], True
        self.refusing = False

    def reach(self, peer, within_s):
        return self.there

    def refuses(self, peer):
        return self.refusing

    def post(self, peer, name, fields):
        assert (peer, name) == (0, "back")
        self.heard.append(fields["number"])

    def hears(self, number: int) -> None:
        """Until it hears a number."""
        self.heard.clear()
        wait_until(lambda: number in self.heard)


@pytest.fixture
def scheduler(monkeypatch):
    monkeypatch.setattr(way_back, "AGAIN_S", 0.01)
    return Scheduler()


def test_it_asks_until_it_is_told_that_it_is_taken_in(scheduler):
    way = WayBack(scheduler, pytest.fail)
    way.begin()
    scheduler.hears(0)
    way.returning(5)
    scheduler.hears(5)
    way.taken_in(5)
    assert way._ended.is_set()
    way.begin()  # lost once more
    scheduler.hears(0)
    way.end()


def test_an_order_does_not_count_that_came_before_the_scheduler_was_lost_again(
    scheduler,
):
    way = WayBack(scheduler, pytest.fail)
    way.begin()
    way.returning(5)
    way.begin()
    way.taken_in(5)
    scheduler.hears(0)
    way.returning(6)
    way.taken_in(6)
    assert way._ended.is_set()


@pytest.mark.parametrize("refusing", [True, False])
def test_it_ends_at_once_when_the_scheduler_has_ended(scheduler, refusing, monkeypatch):
    """But not when there is no way to it."""
    monkeypatch.setattr(way_back, "BACK_S", 0.2)
    scheduler.there, scheduler.refusing, errors = False, refusing, []
    way, began_s = WayBack(scheduler, errors.append), time.monotonic()
    way.begin()
    wait_until(lambda: errors)
    if refusing:
        assert "the scheduler has ended" in str(errors[0])
    else:
        assert "not taken this process in again within 0.2 s" in str(errors[0])
        assert time.monotonic() - began_s >= 0.2

"""Row slots that follow others: the same calls, tokens and caches, call by call."""

import dataclasses
import json
import queue
import threading

import pytest

from moe_edge.engine import lock_step
from moe_edge.engine.lock_step import (
    GuideFailedError,
    LeadingSlots,
    follow,
    row_from_json,
    row_to_json,
)
from moe_edge.engine.slots import RowSlots
from moe_edge.hosts.link import Link
from moe_edge.model.sampling import Sampling
from tests.engine.test_slot_guides import Countdown
from tests.hosts.test_link import pair_of_sockets
from tests.support.running import SIZES, resident, row, run, tokens_of

CACHED = SIZES | {"prompt_cache_bytes": 1 << 20}


class Recorded(RowSlots):
    """Keeps what each call gave."""

    def __init__(self, *args, **sizes):
        super().__init__(*args, **sizes)
        self.given = []

    def decode(self):
        self.given.append((super().decode(), self.on_routing is not None))
        return self.given[-1][0]

    def prefill(self):
        self.given.append((super().prefill(), self.on_routing is not None))
        return self.given[-1][0]


class Both:
    """A leader here, and who follows it in a thread."""

    def __init__(self):
        self.socks, engine = pair_of_sockets(), resident("gqa")
        self.lost = queue.SimpleQueue()
        self.links = [
            Link(index, 2, {1 - index: sock}, on_lost=self.lost.put)
            for index, sock in enumerate(self.socks)
        ]
        self.first = LeadingSlots(engine, self.links[0], **CACHED)
        self.second = Recorded(engine, **CACHED)
        self.error = None
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            follow(self.second, self.links[1])
        except BaseException as error:
            self.error = error

    def wait(self) -> None:
        self._thread.join(300)
        assert not self._thread.is_alive()

    def close(self) -> None:
        for link in self.links:
            link._closed.set()
        for sock in self.socks:
            sock.close()


@pytest.fixture
def both():
    made = Both()
    yield made
    made.close()


def recorded(slots: LeadingSlots):
    """What each told call of a leader gives, as of `Recorded`."""
    given = []

    def keep(compute):
        def call():
            told = slots.has_prompts or compute.__name__ == "decode"
            new = compute()
            if told:
                given.append((new, slots.on_routing is not None))
            return new

        return call

    slots.decode, slots.prefill = keep(slots.decode), keep(slots.prefill)
    return given


def guided(each):
    guide = Countdown(resident("gqa").config.vocab_size)
    return dataclasses.replace(each, guide=guide)


def test_followers_make_the_same_calls_and_get_the_same(both):
    """Rows of all kinds join and leave; K changes; a step is watched."""
    first, given = both.first, recorded(both.first)
    long = row("long", 40, 9, k=1, top_logprobs=2)
    again = dataclasses.replace(long, id="again")  # its beginning is kept
    drawn = Sampling(temperature=0.9, top_k=20, seed=3)
    arrivals = [
        (0, row("a", 9, 14, k=3)),
        (1, long),
        (2, guided(row("b", 12, 9))),
        (3, row("c", 33, 8, sampling=drawn)),
        (4, dataclasses.replace(row("f", 5, 6), forced=(7, 8, 9))),
        (5, again),
    ]
    got = run(first, arrivals, leave=[("a", 7)])
    assert first.cache.num_bytes > 0 and len(got) == len(arrivals)
    first.admit([row("k", 8, 9, k=3)])
    for step in range(9):
        first.on_routing = (lambda layer, routing: None) if step == 4 else None
        first.step()
        first.set_k("k", 1 + step % 2)
    first.release("k")
    first.end()
    both.wait()
    assert both.error is None
    assert both.second.given == given
    assert [watched for _, watched in given].count(True) == 1
    kept = [slots.cache.youngest_first() for slots in (first, both.second)]
    assert [[(k, one.tokens) for k, one in each] for each in kept][0] == [
        (k, one.tokens) for k, one in kept[1]
    ]


class Broken:
    """Fails after a few tokens."""

    def __init__(self, at_fill: bool):
        self._left, self._at_fill = 3, at_fill

    def fill(self, bits_W):
        bits_W[:] = ~bits_W.dtype.type(0)
        if self._at_fill and not self._left:
            raise RuntimeError("too complex")

    def accept(self, token):
        self._left -= 1
        if not self._at_fill and not self._left:
            raise RuntimeError("too complex")


@pytest.mark.parametrize("at_fill", [True, False])
def test_a_guide_that_fails_costs_its_step_and_no_process(both, at_fill):
    first, plain = both.first, row("after", 9, 6)
    first.admit([dataclasses.replace(row("a", 9, 14), guide=Broken(at_fill))])
    with pytest.raises(GuideFailedError, match="a row's guide failed"):
        for _ in range(9):
            first.step()
    first.clear()
    alone = tokens_of(run(RowSlots(resident("gqa"), **CACHED), [(0, plain)]))
    assert tokens_of(run(first, [(0, plain)])) == alone
    first.end()
    both.wait()
    assert both.error is None and both.second.num_rows == 0


def test_a_step_that_fails_ends_its_process_and_says_so(both, monkeypatch):
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(lock_step, "end_process", ended.put)
    monkeypatch.setattr("moe_edge.hosts.link.GRACE_S", 0.05)
    both.first.admit([row("a", 9, 4)])

    def fail(*_):
        raise RuntimeError("no room\nmore")

    monkeypatch.setattr(RowSlots, "prefill", fail)
    both.first.prefill()
    line = "a step failed: RuntimeError: no room"
    for _ in range(2):  # it failed in both
        assert ended.get(timeout=300) == f"{line}; start all processes again"


def test_a_row_is_told_whole():
    each = row("a", 9, 4, k=2, top_logprobs=3, score_prompt=True)
    drawn = Sampling(temperature=0.5, top_k=3, top_p=0.9, seed=7)
    each = dataclasses.replace(each, forced=(1, 2), sampling=drawn)
    told = json.loads(json.dumps(row_to_json(each)))
    assert row_to_json(row_from_json(told, None)) == row_to_json(each)
    assert row_from_json(told, None).prompt == each.prompt
    assert row_from_json(row_to_json(guided(each)), None).guide is not None

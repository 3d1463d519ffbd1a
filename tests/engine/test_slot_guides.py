"""Rows whose tokens a guide allows, beside rows that say what they like."""

import dataclasses

import numpy as np
import pytest

from moe_edge.engine.slots import RowSlots
from moe_edge.model.sampling import Sampling
from tests.support.running import SIZES, alone, engine_of, row, run, tokens_of


class Countdown:
    """Allows one residue of the vocabulary a step, and keeps what it was told."""

    def __init__(self, vocab: int, base: int = 5):
        self.vocab, self.base, self.told, self.asked = vocab, base, [], 0

    def fits(self, token: int, step: int) -> bool:
        return token % self.base == step % self.base

    def fill(self, bits_W):
        self.asked += 1
        step = len(self.told)
        allowed = [self.fits(t, step) for t in range(self.vocab)]
        packed = np.packbits(allowed, bitorder="little")
        bits_W.view(np.uint8)[:] = 0
        bits_W.view(np.uint8)[: len(packed)] = packed

    def accept(self, token):
        self.told.append(token)


def guided(engine, each, **more):
    guide = Countdown(engine.config.vocab_size)
    return dataclasses.replace(each, guide=guide, **more), guide


@pytest.mark.parametrize(("mode", "name"), [("resident", "gqa"), ("fused", "gqa")])
def test_guided_rows_follow_and_others_are_as_alone(mode, name):
    engine = engine_of(mode, name)
    free = [row("a", 9, 10), row("c", 20, 6, k=1)]
    greedy, first = guided(engine, row("b", 12, 9))
    warm = Sampling(temperature=1.3, seed=3, top_p=0.9, top_k=7)
    drawn, second = guided(engine, row("d", 7, 8), sampling=warm)
    slots = RowSlots(engine, **SIZES)
    slots.warm_up()
    compiled = slots.num_compiled()
    arrivals = [(0, free[0]), (1, greedy), (2, drawn), (3, free[1])]
    got = tokens_of(run(slots, arrivals))
    assert slots.num_compiled() == compiled
    for each in free:
        assert got[each.id] == alone(name, each)
    for each, guide in ((greedy, first), (drawn, second)):
        assert guide.told == got[each.id] and len(guide.told) == each.max_new_tokens
        assert all(guide.fits(t, step) for step, t in enumerate(guide.told))
        assert guide.asked <= each.max_new_tokens + 1  # once a token


def test_scores_are_those_of_the_model_before_the_guide():
    engine = engine_of("resident", "gqa")
    each, guide = guided(engine, row("a", 9, 1), top_logprobs=3)
    plain = dataclasses.replace(each, guide=None)
    (new,) = run(RowSlots(engine, **SIZES), [(0, each)])["a"]
    (free,) = run(RowSlots(engine, **SIZES), [(0, plain)])["a"]
    assert guide.fits(new.token, 0)
    assert new.score.top == free.score.top
    assert new.score.logprob <= free.score.logprob

"""Bringing what a layer chose when slots are short at first."""

import pytest

from tests.support.layered import (
    NINE,
    assert_same_bits,
    forced_logits,
    layered,
)
from tests.support.tiny_models import BF16, GQA, random_prompts


def short_fetch(engine, times):
    """Lets the first `times` fetches of decoding have no slot; returns their count."""
    residency, refused = engine.layer_step.residency, []
    demand = residency.demand

    def refusing(layer, experts, step, busy=()):
        is_decode = engine.layer_step.counters[True].misses > 0
        if is_decode and len(experts) and len(refused) < times:
            refused.append(layer)
            return []
        return demand(layer, experts, step, busy)

    residency.demand = refusing
    return refused


def test_a_layer_whose_slots_transfers_had_taken_keeps_its_bits():
    engine = layered("gqa", BF16, 9, predictor="previous")
    refused, drained = short_fetch(engine, times=1), []
    residency = engine.layer_step.residency
    drain = residency.drain
    residency.drain = lambda: drained.append(len(refused)) or drain()
    assert_same_bits(engine, "gqa", BF16, NINE)
    assert len(refused) == 1 and drained.count(1) == 1  # others were of the prompt


def test_a_layer_that_never_gets_its_slots_is_an_error():
    engine = layered("gqa", BF16, 9)
    short_fetch(engine, times=2)
    with pytest.raises(RuntimeError, match="only 0 of . absent experts got slots"):
        forced_logits(engine, random_prompts(GQA, NINE))

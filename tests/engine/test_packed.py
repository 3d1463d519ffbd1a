"""Layered engines that exchange words with their programs compute the same bits."""

import numpy as np
import pytest

from moe_edge.engine.packed_programs import PackedPrograms
from tests.support.layered import (
    NINE,
    THREE,
    assert_same_bits,
    layered,
)
from tests.support.tiny_models import BF16

BITS = ("gqa", BF16, NINE)


def packed(name="gqa", dtype=BF16, slots=9, **options):
    return layered(name, dtype, slots, layer_io="packed", **options)


@pytest.mark.parametrize(
    "name, dtype, lengths, slots, options",
    [
        (*BITS, 9, {}),
        (*BITS, 9, {"with_trace": False}),
        (*BITS, 2, {}),  # decoding in waves
        ("gqa", np.float32, THREE, 6, {}),
        ("mla", np.float32, NINE, 6, {"with_trace": False}),
        ("gpt_oss", BF16, NINE, 8, {"slot_plan": "equal"}),
        (*BITS, 9, {"predictor": "stale_gate", "with_trace": False}),
        (*BITS, 9, {"predictor": "smoe_partial", "eviction": "smoe_score"}),
        (*BITS, 9, {"predictor": "moe_infinity"}),
    ],
)
def test_logits_equal_resident(name, dtype, lengths, slots, options):
    engine = packed(name, dtype, slots, **options)
    assert_same_bits(engine, name, dtype, lengths)
    assert engine.manager.counters[True].misses > slots
    (of_words,) = {*engine.programs.packed.values()} & {engine._steps}
    assert isinstance(of_words, PackedPrograms)
    assert engine._steps.attend._cache_size() > 0


@pytest.fixture
def on_device(monkeypatch):
    """Slots are written by programs, as they are elsewhere than on a CPU."""

    def make_slots(*shape, elsewhere):
        return elsewhere(*shape)

    monkeypatch.setattr("moe_edge.engine.offloaded.make_slots", make_slots)


@pytest.mark.parametrize(
    "layer_io, options",
    [
        ("arrays", {}),
        ("packed", {"memory": "pinned"}),
        ("packed", {"memory": "host", "predictor": "previous"}),
        ("direct", {"memory": "pinned"}),
        ("direct", {"memory": "pinned", "with_trace": False}),
        ("direct", {"memory": "pinned", "predictor": "stale_gate", "horizon": 1}),
        ("direct", {"memory": "pinned", "asynchronous": False}),
    ],
)
def test_logits_equal_resident_where_programs_write_slots(layer_io, options, on_device):
    engine = layered("gqa", BF16, 9, layer_io=layer_io, **options)
    assert_same_bits(engine, *BITS)
    assert engine.manager.counters[True].misses > 9
    stats = engine.manager.queue.stats().demand
    found = engine.manager.counters
    assert stats.count >= sum(each.misses for each in found.values()) - found[True].late

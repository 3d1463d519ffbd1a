"""After a step that raised in its middle, the same engine serves right tokens again."""

import itertools

import jax
import numpy as np
import pytest

from moe_edge.engine.slots import RowSlots
from tests.support.running import SIZES, alone, engine_of, row, run, tokens_of
from tests.support.slow_cases import slow

ROWS = [row("a", 9, 8, k=3), row("b", 40, 8, k=1)]


class DrillError(Exception):
    """What goes wrong."""


def fail(monkeypatch, owner, name: str, call: int, is_after: bool) -> None:
    """The call of this number raises, perhaps after it took what was donated to it."""
    real, calls = getattr(owner, name), itertools.count(1)

    def run(*args, **options):
        is_now = next(calls) == call
        if is_now and not is_after:
            raise DrillError(name)
        result = real(*args, **options)
        if is_now:
            raise DrillError(name)
        return result

    monkeypatch.setattr(owner, name, run)


def transfers(engine):
    return engine.queue


def carrier(engine):
    return engine.queue.carriers[0]


def programs(engine):
    return engine.programs


CASES = [
    # mode, model, whose program or function fails, at which of its calls
    *slow(
        ("resident", "gqa", programs, "layers", 2, True),
        ("resident", "gqa", programs, "decode", 2, True),
    ),
    ("layered", "mla", programs, "advance", 3, True),
    ("layered", "mla", programs, "experts", 2, False),
    ("layered", "mla", carrier, "_source", 5, False),  # of whoever carries blocks
    *slow(("threaded", "mla", carrier, "_source", 5, False)),  # its thread dies
    ("layered", "mla", transfers, "wait", 3, False),
    *slow(
        ("waves", "gpt_oss", programs, "wave", 2, True),
        ("waves", "gpt_oss", carrier, "_source", 40, False),
    ),
    ("fused", "gqa", programs, "layer", 2, True),
    ("fused", "gqa", programs, "decode", 2, True),
]


@pytest.mark.parametrize(("mode", "name", "owner", "what", "call", "is_after"), CASES)
def test_engine_serves_right_tokens_after_a_step_that_raised(
    mode, name, owner, what, call, is_after, monkeypatch
):
    engine = engine_of(mode, name)
    if mode != "resident":
        engine.restart()  # empty slots: blocks travel from the first step on
    slots = RowSlots(engine, **SIZES, prompt_cache_bytes=10**6)
    with monkeypatch.context() as patch:
        fail(patch, owner(engine), what, call, is_after)
        slots.admit(ROWS)
        with pytest.raises(DrillError, match=what):
            for _ in range(20):
                slots.step()
        slots.clear()
    assert slots.num_rows == slots.kv_bytes == len(slots.cache) == 0
    got = tokens_of(run(slots, [(0, ROWS[1]), (2, ROWS[0])]))
    assert got == {each.id: alone(name, each) for each in ROWS}


def test_lost_state_of_a_fused_engine_is_made_anew():
    engine = engine_of("fused", "gqa")
    slots = RowSlots(engine, **SIZES)
    run(slots, [(0, ROWS[0])])
    moved = engine.movement()["bytes_moved"]
    slots.clear()
    assert engine.movement()["bytes_moved"] == moved > 0  # what was counted is there
    for array in jax.tree.leaves(engine._state):
        array.delete()
    slots.clear()
    assert engine.movement()["bytes_moved"] == 0
    got = tokens_of(run(slots, [(0, ROWS[0])]))
    assert got["a"] == alone("gqa", ROWS[0])
    assert np.isfinite(engine.movement()["hit_ratio"])

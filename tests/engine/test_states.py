"""Layers with states: what padding, company, cuts and copies may not change.

One tiny model has short convolutions, delta-nets and attention. That offloaded engines
have the resident one's bits: `test_families.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.engine.prompt_files import PromptFiles
from moe_edge.engine.session import cache_bytes
from moe_edge.engine.slot_rows import SlotRow
from moe_edge.engine.slots import RowSlots
from tests.support.running import (
    alone,
    log_probs_of,
    resident,
    row,
    run,
    states_of,
    tokens_of,
)
from tests.support.tiny_models import STATES, random_prompts, score_all

NAME = "states"
SIZES = {"max_rows": 2, "max_context": 192, "prefill_chunk": 64, "prompt_rows": 2}
CAPACITY = 192
KEPT = {"prompt_cache_bytes": 1 << 20}


@pytest.fixture(scope="module")
def engine():
    return resident(NAME)


def assert_same(*lists) -> None:
    for arrays in zip(*lists, strict=True):
        np.testing.assert_array_equal(arrays[0], arrays[1])


def chunk(engine, session, tokens, start, padded):
    """Runs tokens of the first row, the other one rests; their hidden states."""
    B = len(session.lengths)
    tokens_BS = np.zeros((B, padded), np.int32)
    tokens_BS[0, : len(tokens)] = tokens
    valid = np.zeros((B, padded), bool)
    valid[0, : len(tokens)] = True
    starts = np.full(B, start, np.int32)
    x = engine.run_chunk(session, tokens_BS, valid, starts)
    session.positions_B = jax.device_put(starts + valid.sum(1, dtype=np.int32))
    return np.asarray(x)[0, : len(tokens)]


def decode(engine, session, token, active):
    tokens_B = jnp.full(len(active), token, jnp.int32)
    return np.asarray(engine.decode(session, tokens_B, jnp.array(active)))


@pytest.mark.slow
def test_cuts_buckets_and_company_leave_the_bits(engine):
    (prompt,) = random_prompts(STATES, [150])
    whole = engine.new_session(1, CAPACITY)
    x = chunk(engine, whole, prompt, 0, 192)
    cut = engine.new_session(2, CAPACITY)
    cut_x = [
        chunk(engine, cut, prompt[start : start + 64], start, padded)
        for start, padded in ((0, 64), (64, 96), (128, 48))
    ]
    np.testing.assert_array_equal(np.concatenate(cut_x), x)
    assert_same(states_of(cut), states_of(whole))
    # Padding and a row at rest: nothing moves; a step: as prefill, within rounding.
    assert not any(array.any() for array in states_of(cut, 1))
    before = states_of(cut)
    decode(engine, cut, 5, [False, False])
    assert_same(states_of(cut), before)
    logits = decode(engine, cut, 5, [True, False])
    assert not any(array.any() for array in states_of(cut, 1))
    np.testing.assert_array_equal(decode(engine, whole, 5, [True])[0], logits[0])
    (full,) = score_all(engine, [[*prompt, 5]])
    assert np.abs(logits[0] - full[-1]).max() <= 1e-5 * full.std()


ARRIVALS = [
    (0, row("a", 9, 14, k=3)),
    (2, row("b", 140, 9, k=1)),
    (4, row("c", 100, 12, k=1)),
    (6, row("e", 16, 20, k=3)),
]


@pytest.mark.slow
def test_rows_join_leave_and_move_with_their_states(engine):
    slots = RowSlots(engine, **SIZES)
    got = tokens_of(run(slots, ARRIVALS, leave=[("a", 7)]))
    for _, each in ARRIVALS:
        most = 7 if each.id == "a" else each.max_new_tokens
        assert got[each.id] == alone(NAME, each)[:most]


@pytest.mark.slow
def test_k_changes_between_steps_and_a_resting_row_keeps_its_state(engine):
    """A step that ran ahead would run again at the new K, and states move twice."""
    slots = RowSlots(engine, deterministic=True, **SIZES)
    first, other = row("a", 20, 24, top_logprobs=0), row("b", 30, 2)
    slots.admit([first, other])
    got = []
    while len(got) < 24:
        new = slots.step()
        got += [each.score.logprob for each in new if each.id == "a"]
        if len(got) == 5:  # b has its tokens
            place = slots["b"].place
            rests = states_of(slots._batch.session, place)
        if len(got) == 10:
            slots.set_k("a", 1)
    assert_same(states_of(slots._batch.session, place), rests)
    # The same steps by hand.
    session = engine.new_session(1, CAPACITY)
    logits, wanted = np.asarray(engine.prefill(session, [first.prompt])), []
    for token in slots["a"].tokens[20:]:
        wanted.append(jax.nn.log_softmax(logits[0])[token])
        session.k_B = jnp.array([3 if len(wanted) < 10 else 1], jnp.int32)
        logits = decode(engine, session, token, [True])
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_states_are_kept_behind_chunks_and_served_whole(engine, tmp_path):
    slots = RowSlots(engine, deterministic=True, **SIZES, **KEPT)
    first = row("first", 140, 3)
    other = SlotRow(id="b", prompt=(*first.prompt[:100], 9, 8), max_new_tokens=2)
    third = SlotRow(
        id="c", prompt=(*first.prompt[:70], 7), max_new_tokens=4, top_logprobs=2
    )
    longer = SlotRow(
        id="d", prompt=first.prompt[:139], max_new_tokens=4, top_logprobs=2, k=2
    )
    run(slots, [(0, first)])
    # A state is there behind 128 tokens alone: one that parts before is a miss, and
    # leaves one behind what both share.
    assert [k.tokens for _, k in slots.cache.youngest_first()] == [first.prompt[:128]]
    assert slots.cached_tokens(first.prompt) == 128
    assert slots.cached_tokens(other.prompt) == slots.cached_tokens(third.prompt) == 0
    run(slots, [(0, other)])
    assert slots.cached_tokens(third.prompt) == 64
    assert slots.cached_tokens(first.prompt) == 128
    assert slots.cached_tokens(longer.prompt, 2) == 0  # at another K
    assert PromptFiles(tmp_path, {}).save(slots) == 2
    next_slots = RowSlots(engine, deterministic=True, **SIZES, **KEPT)
    assert PromptFiles(tmp_path, {}).load(next_slots) == 2
    fresh = RowSlots(engine, deterministic=True, **SIZES)
    found = [
        log_probs_of(run(each, [(0, third)]))["c"]
        for each in (slots, next_slots, fresh)
    ]
    np.testing.assert_array_equal(found[0], found[2])
    np.testing.assert_array_equal(found[1], found[2])


@pytest.mark.slow
def test_evicted_state_is_computed_again(engine):
    one = RowSlots(engine, **SIZES).shapes.kept_bytes(128)
    slots = RowSlots(engine, deterministic=True, **SIZES, prompt_cache_bytes=one)
    first, other = row("a", 130, 5), row("b", 140, 5)
    wanted = tokens_of(run(slots, [(0, first)]))
    assert slots.cached_tokens(first.prompt) == 128
    run(slots, [(0, other)])
    assert slots.cached_tokens(first.prompt) == 0 and len(slots.cache) == 1
    assert tokens_of(run(slots, [(0, first)])) == wanted
    assert slots.cached_tokens(first.prompt) == 128


def test_caches_are_counted_by_kind(engine):
    states = 2 * 40 + 2 * (3 * (2 * 2 * 20 + 4 * 14) + 4 * 20 * 14)
    one = 4 * (states + 64 * 2 * 3 * 8)
    assert cache_bytes(STATES, 1, 60) == one
    assert cache_bytes(STATES, 2, 60) == 2 * one
    shapes = RowSlots(engine, **SIZES).shapes
    caches = [jax.tree.leaves(each) for each in engine.new_session(2, 60).caches]
    sizes = [sum(array.nbytes for array in each) for each in caches]
    assert sum(sizes) == 2 * one
    # For a moment there are two of the largest layer.
    for M in shapes.capacities:
        session = engine.new_session(2, M)
        layers = [sum(a.nbytes for a in each.values()) for each in session.caches]
        moved = sum(layers) + max(layers)
        assert shapes.peak_bytes(sum(layers)) >= moved


def test_bad_sizes_are_refused(engine):
    message = "prefill_chunk must be a multiple of 64 .*, got 96"
    with pytest.raises(ConfigError, match=message):
        RowSlots(engine, **SIZES | {"prefill_chunk": 96})
    least = RowSlots(engine, **SIZES).shapes.kept_bytes(64)
    with pytest.raises(CapacityError, match=f"cache of {least - 1} bytes .*{least}"):
        RowSlots(engine, **SIZES, prompt_cache_bytes=least - 1)
    small = RowSlots(engine, **SIZES | {"max_context": 90})
    assert small.shapes.chunk == 96  # no cut: a prompt is one chunk

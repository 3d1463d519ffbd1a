"""The look-up's kernel: a GPU runs its two programs in no order, or at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.kernels import lookup
from tests.support.slow_cases import slow

E, L, K, LAYER, STEP = 12, 3, 3, 1, 7
OWNER_S = np.repeat(np.arange(L, dtype=np.int32), (7, 8, 9))
LIMIT = 2


def tables_of(rng) -> lookup.Tables:
    """Of a cache in the middle of a run: each layer has a slot or two empty."""
    key_S = np.full(OWNER_S.size, -1, np.int32)
    for layer in range(L):
        own = np.flatnonzero(OWNER_S == layer)[rng.integers(1, 3) :]
        key_S[own] = layer * E + rng.permutation(E)[: own.size]
    slot_B = np.full(L * E + 1, -1, np.int32)
    slot_B[key_S[key_S >= 0]] = np.flatnonzero(key_S >= 0)
    last_B = rng.permutation(2 * STEP * L)[: L * E + 1].astype(np.int32)
    counts_L3, ahead_2 = rng.integers(0, 9, (L, 3)), rng.integers(0, 9, 2)
    counts = counts_L3.astype(np.int32), ahead_2.astype(np.int32)
    return lookup.Tables(key_S, last_B, slot_B, *counts)


def look_up(tables, ids_TK, scores_TE, ids_M, value_S):
    """Of a layer; and of its next one in the same launch, unless `ids_M` is None."""
    here = lookup.Here(LAYER, first_of(LAYER), jnp.int32(STEP))
    ahead = None if ids_M is None else coming(ids_M)
    given = {"scores_TE": scores_TE, "value_S": value_S, "ahead": ahead}
    return lookup.look_up(tables, here, ids_TK, jnp.asarray(OWNER_S), **given)


def look_ahead(tables, ids_M, value_S):
    given = tables, coming(ids_M), jnp.int32(STEP), E, jnp.asarray(OWNER_S)
    return lookup.look_ahead(*given, value_S=value_S)


def coming(ids_M) -> lookup.Ahead:
    return lookup.Ahead(LAYER + 1, first_of(LAYER + 1), ids_M, LIMIT)


def first_of(layer: int) -> int:
    return int(np.searchsorted(OWNER_S, layer))


def check_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("tokens, has_value", [(2, False), *slow((1, True), (2, True))])
def test_neither_program_uses_what_the_other_writes(tokens, has_value):
    """Whoever is first: the same tables, rows and plan, also of what came ahead."""
    rng = np.random.default_rng(tokens)
    moved = np.zeros(5, int)
    use, expect = jax.jit(look_up), jax.jit(look_ahead)
    for _ in range(20):
        tables = tables_of(rng)
        scores_TE = rng.random((tokens, E)).astype(np.float32)
        ids_TK = np.argsort(-scores_TE, axis=1)[:, :K].astype(np.int32)
        ids_TK[-1, rng.integers(1, K + 1) :] = E
        ids_M = rng.permutation(E)[:4].astype(np.int32)
        ids_M[rng.integers(1, 5) :] = E
        value_S = rng.integers(0, 3, OWNER_S.size).astype(np.float32)
        value_S = value_S if has_value else None
        one = use(tables, ids_TK, scores_TE, ids_M, value_S)
        before, rows, _ = use(tables, ids_TK, scores_TE, None, value_S)
        after, plan_2M = expect(before, ids_M, value_S)
        check_same(one, (after, rows, plan_2M))
        before, plan_2M = expect(tables, ids_M, value_S)
        after, rows, _ = use(before, ids_TK, scores_TE, None, value_S)
        check_same(one, (after, rows, plan_2M))
        change_2 = one[0].ahead_2 - tables.ahead_2
        change_L3 = one[0].counts_L3 - tables.counts_L3
        moved += np.array([*change_2, *change_L3[LAYER, 1:], change_L3[LAYER + 1, 2]])
    assert moved.all(), "fetched, used, misses, evictions, evictions ahead"

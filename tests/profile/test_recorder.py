"""The sample of an expert's tokens is uniform and depends on seed and place only."""

import numpy as np
import pytest

from moe_edge.profile.counts import sample_tokens


def choices(tokens=400, experts=7, top_k=3, seed=0):
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((tokens, experts)) + np.arange(experts) * 0.2
    return np.argsort(-scores, axis=1)[:, :top_k].astype(np.int32)


def test_rows_are_tokens_that_chose_the_expert_at_that_rank():
    ids = choices()
    for sample in sample_tokens(ids, 7, 50, 3, 1):
        assert (ids[sample.tokens_S, sample.ranks_S] == sample.expert).all()
        assert len(sample.tokens_S) == min(50, (ids == sample.expert).sum())
        assert len(set(sample.tokens_S)) == len(sample.tokens_S)
        assert sample.ranks_S.dtype == np.int8


def test_expert_with_few_tokens_keeps_them_all():
    ids = choices(tokens=20)
    for sample in sample_tokens(ids, 8, 1000, 0, 0):
        expected = np.flatnonzero((ids == sample.expert).any(axis=1))
        np.testing.assert_array_equal(np.sort(sample.tokens_S), expected)
    assert sample.expert == 7 and not len(sample.tokens_S)  # nobody chose it


@pytest.mark.parametrize("other", [(4, 0), (3, 1)])
def test_seed_and_layer_change_the_choice(other):
    ids = choices()
    first, again, changed = (
        [s.tokens_S.tolist() for s in sample_tokens(ids, 7, 50, *place)]
        for place in ((3, 0), (3, 0), other)
    )
    assert first == again
    assert all(a != b for a, b in zip(first, changed, strict=True))


def test_every_token_is_equally_likely_and_so_is_every_row():
    tokens, kept, runs = 60, 12, 3000
    ids = np.zeros((tokens, 1), np.int32)
    times_TS = np.zeros((tokens, kept))
    for seed in range(runs):
        (sample,) = sample_tokens(ids, 1, kept, seed, 0)
        times_TS[sample.tokens_S, np.arange(kept)] += 1
    times_T = times_TS.sum(axis=1)
    expected = runs * kept / tokens
    spread = np.sqrt(runs * (kept / tokens) * (1 - kept / tokens))
    assert np.abs(times_T - expected).max() < 4.5 * spread
    # Rows are in random order: early tokens do not gather in early rows.
    first_half = times_TS[: tokens // 2].sum(axis=0)
    assert np.abs(first_half - runs / 2).max() < 4.5 * np.sqrt(runs / 4)

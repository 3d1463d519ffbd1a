import numpy as np
import pytest

from moe_edge.papers.smoe.studies.fig6 import needed, rank_correlation, reuse_by_rank


def scores_of(*rows):
    """[N, 1, E] of one layer."""
    return np.asarray(rows, np.float32)[:, None]


def test_needed_marks_chosen_and_alternatives():
    # k = 1: the best unchosen score is 0.4; alternatives lie above 0.8 * 0.4.
    scores = scores_of([0.5, 0.4, 0.33, 0.2])
    chosen, either = needed(scores, top_k=1, a=0.2)
    assert chosen[0, 0].tolist() == [True, False, False, False]
    assert either[0, 0].tolist() == [True, True, True, False]


def test_needed_a_of_zero_adds_nothing():
    scores = np.random.default_rng(0).random((5, 2, 6), np.float32)
    chosen, either = needed(scores, top_k=2, a=0.0)
    assert (chosen == either).all() and (chosen.sum(axis=-1) == 2).all()


def test_reuse_counts_the_next_tokens_by_rank_of_the_score():
    scores = scores_of([0.6, 0.3, 0.1], [0.1, 0.6, 0.3], [0.1, 0.6, 0.3])
    chosen, _ = needed(scores, top_k=1, a=0.0)
    # Token 0 ranks 0, 1, 2; expert 1 is chosen next. Token 1 ranks 1, 2, 0; again 1.
    reuse = reuse_by_rank(scores, chosen, ahead=1)
    assert reuse.tolist() == [[0.5, 0.5, 0.0]]
    # Only token 0 has two tokens after it.
    assert reuse_by_rank(scores, chosen, ahead=2).tolist() == [[0.0, 1.0, 0.0]]


def test_rank_correlation_sign_and_ties():
    assert rank_correlation(np.array([0.9, 0.5, 0.1])) == pytest.approx(-1)
    assert rank_correlation(np.array([0.1, 0.2, 0.7])) == pytest.approx(1)
    assert rank_correlation(np.array([0.3, 0.3, 0.3])) == 0.0

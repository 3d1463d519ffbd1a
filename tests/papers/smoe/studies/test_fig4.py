"""One rank changed: routes by hand."""

import numpy as np

from moe_edge.papers.smoe.studies.fig4 import OneRank
from tests.support.tiny_models import GQA

SCORES = np.array([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]], np.float32)
IDS = np.array([[0, 1], [3, 4]], np.int32)  # the second token chose one; 4: no expert
WEIGHTS = np.array([[0.8, 0.6], [1.0, 0.0]], np.float32)


def changed(rank, replaces):
    here_E = np.ones(4, bool)
    given = 0, SCORES, here_E, GQA.moe, IDS, WEIGHTS
    return OneRank(rank, replaces).route(*given)


def test_a_rank_left_out_gives_its_weight_to_the_others():
    ids_TK, weights_TK = changed(1, False)
    assert ids_TK.tolist() == [[0, 4], [3, 4]]
    np.testing.assert_allclose(weights_TK, [[1.4, 0], [1, 0]], rtol=1e-6)


def test_a_rank_gives_way_to_the_best_not_chosen_with_its_own_score():
    ids_TK, weights_TK = changed(0, True)
    assert ids_TK.tolist() == [[2, 1], [2, 4]]
    np.testing.assert_allclose(weights_TK, [[0.56, 0.84], [1, 0]], rtol=1e-6)
    assert IDS[0, 0] == 0 and ids_TK.dtype == np.int32


def test_a_token_whose_only_expert_is_left_out_has_none():
    ids_TK, weights_TK = changed(0, False)
    assert ids_TK.tolist() == [[4, 1], [4, 4]]
    np.testing.assert_allclose(weights_TK, [[0, 1.4], [0, 0]], rtol=1e-6)

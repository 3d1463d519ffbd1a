"""Choices by class, counted by hand."""

import numpy as np
import pytest

from moe_edge.papers.smoe.studies.score_classes import brought, is_top
from moe_edge.workload.traces import DECODE, PREFILL, TraceRecorder

SCORES = np.array([[0.5, 0.22, 0.2, 0.08], [0.1, 0.3, 0.35, 0.25]], np.float32)


def test_top_score_choices_exceed_the_best_not_chosen_by_a():
    own_TK = np.array([[0, 1], [2, 1]])
    assert is_top(SCORES, own_TK, 0.2).tolist() == [[True, False], [True, True]]
    assert is_top(SCORES, own_TK, 0.0).all()


def test_what_gave_way_to_a_substitute_had_not_to_be_brought():
    recorder = TraceRecorder(4, 2)

    def add(phase, step, ids_TK, hit_TK):
        given = np.array(ids_TK), np.ones((2, 2)), np.array(hit_TK)
        recorder.add(phase, step, 0, *given, scores_TE=SCORES, request_T=[0, 1])

    add(PREFILL, [0, 1], [[0, 1], [2, 1]], [[False, False], [False, False]])
    # Expert 1 of the first token, low-score, gave way to expert 2.
    add(DECODE, 2, [[0, 2], [2, 1]], [[True, True], [True, False]])
    add(DECODE, 3, [[0, 1], [2, 1]], [[False, False], [True, True]])
    found = brought(recorder.trace(), 0.2)
    assert found == pytest.approx((2 / 8, 2 / 6, 1 / 2, 1 / 3))


def test_a_run_that_brings_nothing():
    recorder = TraceRecorder(4, 2)
    ids_TK, here_TK = np.array([[0, 1], [2, 1]]), np.ones((2, 2), bool)
    weights_TK = np.ones((2, 2))
    recorder.add(DECODE, 0, 0, ids_TK, weights_TK, here_TK, scores_TE=SCORES)
    assert brought(recorder.trace(), 0.2)[1:] == (0, 0, 0)

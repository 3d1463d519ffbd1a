"""Recall as OD-MoE counts it, by hand."""

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.papers.od_moe.shadow.recall import count_correct, recall, recall_by_index

# Two prompts of one dense and two MoE layers, k = 2; the second ends after one step.
INDEX = np.array([1, 2, 1])
DENSE = [-1, -1]
ACTUAL = np.array(
    [[DENSE, [0, 1], [2, 3]], [DENSE, [4, 5], [0, 3]], [DENSE, [1, 0], [5, 2]]]
)
PREDICTED = np.array(
    [[DENSE, [1, 0], [2, 5]], [DENSE, [4, 1], [1, 2]], [DENSE, [-1, -1], [2, 5]]]
)


def test_counts_are_sets_and_nothing_is_no_expert():
    np.testing.assert_array_equal(
        count_correct(ACTUAL, PREDICTED), [[0, 2, 1], [0, 1, 0], [0, 0, 2]]
    )


def test_recall_counts_every_step_once():
    assert recall(ACTUAL, PREDICTED) == 6 / 12
    assert recall(ACTUAL, ACTUAL) == 1.0
    assert np.isnan(recall(ACTUAL[:0], PREDICTED[:0]))


def test_ended_prompts_drop_out_of_later_indexes():
    np.testing.assert_allclose(
        recall_by_index(INDEX, ACTUAL, PREDICTED), [5 / 8, 1 / 4]
    )
    late = recall_by_index(INDEX + 1, ACTUAL, PREDICTED)
    assert np.isnan(late[0]) and late[2] == 1 / 4


def test_predictions_of_another_run_are_refused():
    with pytest.raises(ConfigError, match=r"\(2, 3\) steps and layers, choices of \(3"):
        recall(ACTUAL, PREDICTED[:2])

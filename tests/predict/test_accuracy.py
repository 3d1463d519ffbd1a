"""Recall and precision on predictions counted by hand."""

import json

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.predict.accuracy import PredictionLog


def test_prediction_log_counts_by_layer_and_look_ahead():
    log = PredictionLog(num_layers=3, num_experts=6, look_ahead=2)
    log.expect(0, np.array([[1, 2, 3], [4, -1, -1]]))  # of layers 1 and 2
    log.chosen(1, np.array([[1, 5], [2, 1], [6, 6]]))  # chose 1, 2, 5
    log.expect(1, np.array([[0, 4]]))  # of layer 2; nothing of layer 0
    log.chosen(2, np.array([[4, 0]]))
    log.chosen(0, np.array([[4, 0]]))
    assert log.hits_LA.tolist() == [[0, 0], [2, 0], [2, 1]]
    assert log.predicted_LA.tolist() == [[0, 0], [3, 0], [2, 1]]
    assert log.chosen_LA.tolist() == [[0, 0], [3, 0], [2, 2]]
    assert log.rounds_LA.tolist() == [[0, 0], [1, 0], [1, 1]]
    assert log.summary() == {
        "recall": [0.8, 0.5],
        "precision": [0.8, 1.0],
        "rounds": [2, 1],
        "recall_by_layer": [[None, None], [0.666667, None], [1.0, 0.5]],
        "precision_by_layer": [[None, None], [0.666667, None], [1.0, 1.0]],
    }
    json.dumps(log.summary(), allow_nan=False)


def test_prediction_log_of_nothing_lowers_recall():
    log = PredictionLog(2, 4)
    log.expect(0, np.zeros((1, 0), np.int32))
    log.chosen(1, np.array([[3, 1]]))
    assert log.summary()["recall"] == [0.0] and log.summary()["precision"] == [None]


def test_prediction_log_compares_once_and_replaces_what_waits():
    log = PredictionLog(2, 4)
    log.expect(0, np.array([[3, 1]]))
    log.expect(0, np.array([[0], [2]]))  # a row beyond the look-ahead
    log.chosen(1, np.array([[3, 0]]))
    log.chosen(1, np.array([[3, 0]]))
    assert log.hits_LA.tolist() == [[0], [1]]
    assert log.predicted_LA.tolist() == [[0], [1]]
    assert log.rounds_LA.tolist() == [[0], [1]]


def test_prediction_log_rejects_look_ahead():
    with pytest.raises(ConfigError, match="look_ahead must be .* got 0"):
        PredictionLog(2, 4, look_ahead=0)

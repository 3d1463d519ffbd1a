"""MoE-Infinity's matrices, against a reference written out row by row."""

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.predict.activation_matrix import ActivationMatrix
from tests.predict.support import Shape, rows_of

SHAPE = Shape(num_layers=3, num_experts=6, top_k=2)


def run(predictor, state, sequence_TLK, finish=True):
    fresh = state
    for token_LK in sequence_TLK:
        for layer, ids_K in enumerate(token_LK):
            state = predictor.observe(state, layer, None, ids_K[None], None)
    return predictor.finish_sequence(state, fresh) if finish else state


def count_matrix(sequence_TLK, num_experts):
    T, L, K = sequence_TLK.shape
    counts_LE = np.zeros((L, num_experts))
    for layer in range(L):
        counts_LE[layer] = np.bincount(
            sequence_TLK[:, layer].ravel(), minlength=num_experts
        )
    return counts_LE


def random_sequence(rng, tokens=4):
    return np.array(
        [[rng.choice(6, 2, replace=False) for _ in range(3)] for _ in range(tokens)]
    )


def test_activation_matrix_without_history_predicts_nothing():
    predictor = ActivationMatrix()
    state = predictor.init(SHAPE)
    state = predictor.observe(state, 0, None, np.array([[1, 2]]), None)
    assert predictor.predict(state, 0, 2)[0].shape == (2, 0)


def test_activation_matrix_golden_of_two_sequences():
    predictor = ActivationMatrix()
    state = predictor.init(SHAPE)
    state = run(predictor, state, np.array([[[0, 1], [2, 3], [4, 5]]]))
    state = run(predictor, state, np.array([[[4, 5], [0, 1], [2, 3]]] * 3))
    state = predictor.observe(state, 0, None, np.array([[5, 1]]), None)
    # Both rows have cosine 1/2: the first one stays nearest.
    assert rows_of(predictor.predict(state, 0, 2)) == [[2, 3], [4, 5]]
    state = predictor.observe(state, 1, None, np.array([[0, 4]]), None)
    ids, scores = predictor.predict(state, 1, 2)
    assert ids.tolist() == [[2, 3], [4, 5]]  # the second matrix; then next token
    expected = [[0.5 * (1 - 1 / 4)] * 2, [0.5 * (1 - 2 / 4)] * 2]
    np.testing.assert_allclose(scores, expected, rtol=1e-6)


def test_activation_matrix_matches_reference():
    rng, predictor = np.random.default_rng(0), ActivationMatrix()
    state, past = predictor.init(SHAPE), []
    for _ in range(7):
        past.append(random_sequence(rng))
        state = run(predictor, state, past[-1])
    shares = [count_matrix(seq, 6) for seq in past]
    shares = [counts / counts.sum(axis=1, keepdims=True) for counts in shares]
    current = random_sequence(rng, tokens=3)
    for t in range(3):
        for layer in range(3):
            ids = current[t, layer][None]
            state = predictor.observe(state, layer, None, ids, None)
            counts_LE = count_matrix(current[:t], 6)
            counts_LE[: layer + 1] = count_matrix(current[: t + 1], 6)[: layer + 1]

            def similarity(share_LE, counts_LE=counts_LE, layer=layer):
                return np.mean(
                    [
                        share_LE[i]
                        @ counts_LE[i]
                        / np.linalg.norm(share_LE[i])
                        / np.linalg.norm(counts_LE[i])
                        for i in range(layer + 1)
                    ]
                )

            similarities = [similarity(share_LE) for share_LE in shares]
            best = np.sort(similarities)[-2:]
            assert best[1] - best[0] > 1e-4, "a tie would make the test blind"
            nearest = shares[int(np.argmax(similarities))]
            ids_NM, scores_NM = predictor.predict(state, layer, 3)
            for j, target in enumerate((layer + 1 + np.arange(3)) % 3):
                wanted_E = (nearest[target] + 1e-8) * (1 - (j + 1) / 4)
                order = np.argsort(-wanted_E, kind="stable")[:2]
                assert ids_NM[j].tolist() == order.tolist()
                np.testing.assert_allclose(scores_NM[j], wanted_E[order], rtol=1e-5)


def test_activation_matrix_full_collection_replaces_the_oldest():
    predictor = ActivationMatrix(capacity=2)
    state = predictor.init(SHAPE)
    for first in (0, 1, 2):
        state = run(predictor, state, np.full((1, 3, 1), first))
    assert state["share_LCE"].shape == (3, 2, 6)
    assert state["share_LCE"][0].argmax(axis=1).tolist() == [2, 1]
    kept = state["share_LCE"]
    again = predictor.finish_sequence(state, state)
    assert again["share_LCE"] is kept, "nothing was seen"


def test_activation_matrix_rejects_capacity():
    with pytest.raises(ConfigError, match="collection must be .* got 0"):
        ActivationMatrix(capacity=0)

import types

import numpy as np
import pytest

from moe_edge.evaluate import likelihood
from moe_edge.evaluate.likelihood import rows_per_batch, token_log_probs
from tests.support.table_engine import TableEngine


@pytest.mark.parametrize("chunk", [1, 4, 5, 16])
def test_token_log_probs_matches_log_softmax(chunk):
    engine = TableEngine(chunk=chunk)
    rows = [[1, 2, 3, 4, 5, 6, 7], [3], [9, 8, 7, 10]]
    out = token_log_probs(engine, rows)
    assert out.shape == (3, 7)
    expected = np.zeros((3, 7))
    for b, row in enumerate(rows):
        for i in range(1, len(row)):
            expected[b, i] = engine.log_prob(row[i - 1], row[i])
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_rows_per_batch_is_bounded_by_logits(monkeypatch):
    monkeypatch.setattr(likelihood, "LOGITS_BYTES", 4 * 100 * 10 * 3)
    config = types.SimpleNamespace(vocab_size=100)
    assert rows_per_batch(config, 10, 8) == 3
    assert rows_per_batch(config, 10, 2) == 2
    assert rows_per_batch(config, 1000, 8) == 1

"""Main, shadow and workers together, on sockets: gate A, recall, losses."""

import numpy as np
import pytest

from moe_edge.cluster.asked import NobodyLeft
from moe_edge.predict.recall import recall, recall_by_index


def check(run, row):
    """What holds in every run."""
    assert run.tokens == run.wanted and row["same_tokens"]
    assert row["lost_requests"] == 0
    stored = run.predictions()
    actual, predicted = stored["actual_NLK"], stored["predicted_NLK"]
    steps = sum(len(tokens) - 1 for tokens in run.tokens)
    assert actual.shape == predicted.shape == (steps, 2, 2)
    assert stored["request"].shape == stored["index"].shape == (steps,)
    for request, tokens in enumerate(run.tokens):
        mine = stored["index"][stored["request"] == request]
        np.testing.assert_array_equal(mine, np.arange(1, len(tokens)))
    assert (actual >= 0).all() and row["recall"] == recall(actual, predicted)
    by_index = recall_by_index(stored["index"], actual, predicted)
    np.testing.assert_array_equal(row["recall_by_index"], by_index)
    return stored


@pytest.mark.parametrize("departure", ["late", "speculative"])
@pytest.mark.parametrize("shadow", ["full", "int8", "random", "none"])
def test_tokens_are_the_models_whatever_is_predicted(live, shadow, departure):
    with live(shadow=shadow, departure=departure) as run:
        row = run.run()
        stored = check(run, row)
    if shadow == "full":
        assert row["recall"] == 1.0
    elif shadow == "none":
        assert row["recall"] == 0.0 and (stored["predicted_NLK"] == -1).all()
    elif shadow == "random":
        assert 0.0 < row["recall"] < 0.7  # .25 by chance
        assert (stored["predicted_NLK"] >= 0).all()
    else:
        assert 0.5 < row["recall"] <= 1.0
    assert row["compiled_after_warmup"] == 0

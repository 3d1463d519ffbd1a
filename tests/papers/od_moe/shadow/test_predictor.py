"""The shadow predictor: when it is aligned, and what it names."""

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.papers.od_moe.shadow.formats import FORMATS
from moe_edge.papers.od_moe.shadow.predictor import PRECISIONS, Shadow, is_due
from moe_edge.predict.base import NOT_WANTED, get_predictor, rank_scores
from tests.predict.support import Shape, rows_of

SHAPE = Shape(num_layers=4, num_experts=6, top_k=2)


@pytest.mark.parametrize(
    "period, due", [(0, []), (1, [1, 2, 3, 4, 5, 6, 7]), (2, [1, 3, 5, 7]), (4, [1, 5])]
)
def test_alignment_comes_before_the_first_step_and_then_every_period(period, due):
    assert [step for step in range(1, 8) if is_due(step, period)] == due


def test_prompt_is_run_unless_both_are_aligned():
    assert not Shadow(token_period=2, kv_period=4).needs_prompt
    assert Shadow(token_period=0).needs_prompt
    assert Shadow(kv_period=0).needs_prompt


def test_prediction_goes_from_the_layer_to_the_end_of_the_token():
    shadow = Shadow()
    state = shadow.init(SHAPE)
    assert shadow.predict(state, 3, 2)[0].shape == (2, 0)
    choices = [[0, 1], [2, 3], [4, 5], [1, 0]]
    wanted_LE = np.stack([rank_scores(np.array([ids]), 6) for ids in choices])
    state = shadow.store(state, -1, wanted_LE)
    assert rows_of(shadow.predict(state, -1, 2)) == [[0, 1], [2, 3]]
    assert rows_of(shadow.predict(state, 1, 3)) == [[4, 5], [1, 0], []]
    assert shadow.predict(state, 3, 2)[0].shape == (2, 0)  # of the next token: nothing
    wanted_LE[1:] = NOT_WANTED  # the shadow has run its first layer
    assert rows_of(shadow.predict(shadow.store(state, -1, wanted_LE), -1, 2)) == [
        [0, 1],
        [],
    ]


def test_precisions_are_the_formats_and_the_model_itself():
    assert PRECISIONS == ("full", *FORMATS)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"precision": "q3"}, "shadow precision 'q3'; known: .*nf4"),
        ({"token_period": -1}, "token_period must be .* 0 for never, got -1"),
        ({"kv_period": 1.5}, "kv_period is 1.5, expected a whole number"),
        ({"kv_period": True}, "kv_period is True, expected a whole number"),
        ({"period": 1}, "shadow has no option 'period'; known: precision, token_per"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        get_predictor("shadow", **options)

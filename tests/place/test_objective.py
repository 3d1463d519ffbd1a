"""Eq. 2 and what statistics must be."""

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.place.optimal import objective
from moe_edge.place.problem import check_frequency


def test_objective_sums_what_is_remote():
    frequency_NLE = np.array([[[0.5, 0.3, 0.2]], [[0.1, 0.1, 0.8]]])
    on_NLE = np.array([[[True, False, False]], [[False, True, True]]])
    assert objective(frequency_NLE, on_NLE) == pytest.approx(0.3 + 0.2 + 0.1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -0.5])
def test_check_frequency_bad_value_is_named(bad):
    frequency_NLE = np.ones((2, 3, 4))
    frequency_NLE[1, 2, 3] = bad
    with pytest.raises(ConfigError, match=rf"\[1, 2, 3\] is {bad}"):
        check_frequency(frequency_NLE)


def test_check_frequency_silent_layer_is_named():
    frequency_NLE = np.ones((2, 3, 4))
    frequency_NLE[1, 0] = 0
    with pytest.raises(ConfigError, match=r"\(server, layer\) \[1, 0\] sum to 0"):
        check_frequency(frequency_NLE)


def test_check_frequency_wrong_rank_is_refused():
    with pytest.raises(ConfigError, match=r"shape \(3, 4\)"):
        check_frequency(np.ones((3, 4)))

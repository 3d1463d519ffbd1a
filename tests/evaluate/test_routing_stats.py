"""Entropy of expert usage, on counts small enough to check by hand."""

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.evaluate.routing_stats import usage_entropy


def test_usage_entropy_of_even_and_single_use_is_log2_and_zero():
    counts_NLE = np.array([[[5, 5, 5, 5], [7, 0, 0, 0]]])
    np.testing.assert_allclose(usage_entropy(counts_NLE), [[2.0, 0.0]])


def test_usage_entropy_rejects_layer_without_choices():
    with pytest.raises(ConfigError, match=r"expert counts at \[0, 1\] sum to 0"):
        usage_entropy(np.array([[[1, 1], [0, 0]]]))

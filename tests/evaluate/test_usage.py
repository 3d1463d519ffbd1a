"""Entropy of expert usage, on counts small enough to check by hand."""

import types

import jax
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine.resident import ResidentEngine
from moe_edge.evaluate.perplexity import measure_perplexity
from moe_edge.evaluate.usage import UsageCounter, usage_distances, usage_entropy
from tests.support.tiny_models import GQA, random_prompts, random_weights


def test_usage_distances_golden():
    # One layer, two experts; domain 0 uses expert 0 only, domain 1 mostly expert 1.
    counts_NPLE = np.asarray([[[[4, 0]], [[8, 0]]], [[[1, 3]], [[0, 5]]]])
    between, within = usage_distances(counts_NPLE)
    # Pairs: (1, 0) against (0, 1) = 1; (1/4, 3/4) against (1, 0) = 3/4.
    np.testing.assert_allclose(between, [(1 + 0.75) / 2])
    # Within: 0 and 1/4.
    np.testing.assert_allclose(within, [0.125])


def test_usage_distances_rejects_a_single_domain():
    with pytest.raises(ConfigError, match="got 2 of 1"):
        usage_distances(np.ones((1, 2, 1, 2)))


def test_usage_counter_leaves_padding_out():
    config = types.SimpleNamespace(
        moe_layers=(1,), moe=types.SimpleNamespace(num_experts=3)
    )
    counter = UsageCounter(config)
    ids = jax.device_put(np.asarray([[0, 2], [2, 1], [3, 3]]))  # 3 marks padding
    counter(1, types.SimpleNamespace(ids_TK=ids))
    np.testing.assert_array_equal(counter.counts_LE, [[1, 1, 2]])


def test_usage_counter_counts_every_token_of_windows_once():
    engine = ResidentEngine(random_weights(GQA))
    ids = random_prompts(GQA, [70])[0]
    counter = UsageCounter(GQA)
    options = {"window": 32, "stride": 32, "batch_size": 2}
    measure_perplexity(engine, ids, on_routing=counter, **options)
    # 3 windows in batches of 2: the row that fills up the second is not counted.
    np.testing.assert_array_equal(counter.counts_LE.sum(-1), [70 * 3] * 2)


def test_usage_entropy_of_even_and_single_use_is_log2_and_zero():
    counts_NLE = np.array([[[5, 5, 5, 5], [7, 0, 0, 0]]])
    np.testing.assert_allclose(usage_entropy(counts_NLE), [[2.0, 0.0]])


def test_usage_entropy_rejects_layer_without_choices():
    with pytest.raises(ConfigError, match=r"expert counts at \[0, 1\] sum to 0"):
        usage_entropy(np.array([[[1, 1], [0, 0]]]))

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from moe_edge.convert.refactored_records import (
    down_factor,
    is_exact,
    neurons_of,
    split_records,
    sub_layout,
)
from moe_edge.convert.refactored_router import repeat_router
from moe_edge.core.checks import CheckpointError, ConfigError
from moe_edge.model.config import MoeConfig
from moe_edge.model.record import RecordLayout
from moe_edge.papers.moe_prism.refactor.finetune.settings import FineTuning
from tests.support.tiny_models import GQA

LAYOUT = RecordLayout(d_model=6, expert_dim=12, has_bias=True)
E, U = 3, 4


def experts(dtype=np.float32):
    rng = np.random.default_rng(0)
    return rng.standard_normal((E, LAYOUT.size), np.float32).astype(dtype)


def labels(seed=1):
    rng = np.random.default_rng(seed)
    return rng.permuted(np.tile(np.arange(12) % U, (E, 1)), axis=1)


def test_blocks_hold_their_neurons_in_order():
    records, labels_EF = experts(), labels()
    blocks = split_records(records, labels_EF, LAYOUT, U, factor=1)
    child = sub_layout(LAYOUT, U)
    assert blocks.shape == (E * U, child.size) and child.expert_dim == 3
    for expert in range(E):
        for sub in range(U):
            mine = np.flatnonzero(labels_EF[expert] == sub)
            got = {n: child.part(blocks[expert * U + sub], n) for n in child.shapes}
            whole = {n: LAYOUT.part(records[expert], n) for n in LAYOUT.shapes}
            for name in ("gate", "up", "gate_bias", "up_bias"):
                np.testing.assert_array_equal(got[name], whole[name][mine])
            np.testing.assert_array_equal(got["down"], whole["down"][:, mine])
            np.testing.assert_array_equal(got["down_bias"], whole["down_bias"] / U)
    assert not blocks[:, child.num_values :].any()  # padding


@pytest.mark.parametrize("factor", [1, 4])
def test_outputs_sum_to_the_parent(factor):
    """With a weight of 1 / factor a block; the down bias is counted once in all."""
    records = experts()
    blocks = split_records(records, labels(), LAYOUT, U, factor)

    def run(layout, record, x):
        p = {name: layout.part(record, name) for name in layout.shapes}
        hidden = np.maximum(p["gate"] @ x + p["gate_bias"], 0)
        hidden = hidden * (p["up"] @ x + p["up_bias"])
        return p["down"] @ hidden + p["down_bias"]

    x = np.random.default_rng(2).standard_normal(6).astype(np.float32)
    parts = [run(sub_layout(LAYOUT, U), block, x) / factor for block in blocks[:U]]
    np.testing.assert_allclose(sum(parts), run(LAYOUT, records[0], x), rtol=1e-5)


def test_powers_of_two_are_exact_and_others_round_once():
    records = experts(ml_dtypes.bfloat16)
    down = LAYOUT.part(records, "down")[0].astype(np.float64)
    for subs, factor in ((4, 4), (3, 3)):
        labels_EF = np.tile(np.arange(12) // (12 // subs), (E, 1))
        blocks = split_records(records, labels_EF, LAYOUT, subs, factor)
        got = sub_layout(LAYOUT, subs).part(blocks[:subs], "down").astype(np.float64)
        got = np.concatenate(list(got), axis=1)
        error = np.abs(got / (factor * down) - 1).max()
        assert is_exact(factor, subs, has_bias=False) == (error == 0)
        assert error <= 2**-8  # half a step of bfloat16


def test_down_biases_round_unless_the_parts_are_a_power_of_two():
    records = experts(ml_dtypes.bfloat16)
    bias = LAYOUT.part(records, "down_bias").astype(np.float64)
    for subs, factor in ((4, 1), (3, 1), (3, 3), (4, 4)):
        labels_EF = np.tile(np.arange(12) // (12 // subs), (E, 1))
        blocks = split_records(records, labels_EF, LAYOUT, subs, factor)
        got = sub_layout(LAYOUT, subs).part(blocks, "down_bias").astype(np.float64)
        same = (got.reshape(E, subs, -1).sum(axis=1) == factor * bias).all()
        assert same or not is_exact(factor, subs, has_bias=True)
    assert is_exact(1, 4, has_bias=True) and is_exact(1, 3, has_bias=False)
    assert not is_exact(1, 3, has_bias=True)


def test_float16_overflow_is_refused():
    records = experts(np.float16)
    LAYOUT.part(records, "down")[1, 2, 3] = 30_000.0
    with pytest.raises(CheckpointError, match="times 4 overflow float16; convert"):
        split_records(records, labels(), LAYOUT, U, 4)
    assert np.isfinite(split_records(records, labels(), LAYOUT, U, 2)).all()


@pytest.mark.parametrize(
    "bad", [np.zeros((E, 12), int), np.tile(np.arange(12) % 3, (E, 1))]
)
def test_unequal_labels_are_refused(bad):
    with pytest.raises(ConfigError, match="labels must put 3 of 12 neurons into each"):
        neurons_of(bad, U)


def test_down_factor_follows_the_normalisation():
    moe = {"num_experts": 8, "top_k": 2, "expert_dim": 8}
    rules = {
        ("softmax", False): 4,
        ("softmax", True): 4,
        ("softmax_topk", False): 4,
        ("sigmoid", True): 4,
        ("sigmoid", False): 1,
    }
    for (scoring, norm), factor in rules.items():
        config = MoeConfig(**moe, scoring=scoring, norm_topk=norm)
        assert down_factor(config, 4, "linear") == factor
        assert down_factor(config, 4, "proxy_global") == 1


def test_router_rows_are_repeated_and_nothing_else():
    dense = {
        "router.weight": np.arange(6).reshape(3, 2),
        "router.correction_bias": np.arange(3),
        "attn.q": np.arange(3),
    }
    got = repeat_router(dense, 2, "sigmoid")
    np.testing.assert_array_equal(
        got["router.weight"], [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]
    )
    np.testing.assert_array_equal(got["router.correction_bias"], [0, 0, 1, 1, 2, 2])
    assert got["attn.q"] is dense["attn.q"]
    # A softmax's scores are halved, and so is what is added to them.
    dense = {"router.correction_bias": np.asarray([3.0, 1.0], np.float32)}
    got = repeat_router(dense, 2, "softmax")["router.correction_bias"]
    np.testing.assert_array_equal(got, np.asarray([1.5, 1.5, 0.5, 0.5], np.float32))


def test_fine_tuning_through_factors_behind_layers_is_refused():
    config = dataclasses.replace(GQA, dense_layers=(), layer_scale=True)
    with pytest.raises(ConfigError, match="no gradient passes the factor behind its"):
        FineTuning().check(config)

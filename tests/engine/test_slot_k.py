"""K of a row is data: in company of other K it gets what its operating point gives.

Over refactored models: blocks of a proxy gate's pattern are cut in the middle of a
token's choice, not at its end.
"""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.slots import RowSlots
from moe_edge.engine.weights import load_weights
from moe_edge.model.router import Router
from moe_edge.model.shapes import router_shapes
from moe_edge.model.sub_experts import at_k, split_config
from tests.support.layered import StoreReader
from tests.support.running import OPTIONS, SIZES, log_probs_of, row, run, tokens_of
from tests.support.tiny_models import MOE_ONLY

SHARES = ((0.3, 0.2), (0.2, 0.1), (0.15, 0.05))
SPLITS = {
    "global": split_config(MOE_ONLY, 2, gate="proxy_global", gate_neurons=3),
    "pattern": split_config(
        MOE_ONLY, 2, gate="proxy_pattern", gate_neurons=3, rank_shares=SHARES
    ),
}
LENGTHS = {1: 9, 4: 33, 6: 5}  # by K: of prompts
ROWS = [row(k, size, 8, k=k, top_logprobs=3) for k, size in LENGTHS.items()]
# The first two run together from the start, the other joins the one that stays.
ARRIVALS = [*zip((0, 0, 2), ROWS, strict=True)]


@pytest.mark.parametrize("gate", SPLITS)
def test_router_with_k_as_data_chooses_what_that_of_a_point_chooses(gate):
    rng, config = np.random.default_rng(0), SPLITS[gate]
    x_TD = rng.standard_normal((7, config.d_model), np.float32)
    weights = {
        name: rng.standard_normal(shape, np.float32)
        for name, shape in router_shapes(config).items()
    }

    def route(config, k_T=None):
        router = nnx.eval_shape(lambda: Router(config, nnx.Rngs(0)))
        nnx.update(router, jax.tree.map(nnx.Param, jax.device_put(weights)))
        return jax.device_get(jax.jit(router)(x_TD, k_T))

    k_T = np.array([1, 6, 4, 1, 6, 4, 4], np.int32)
    got = route(config, k_T)
    for k in (1, 4, 6):
        want, here_T = route(at_k(config, k)), k_T == k
        ids_TK, weights_TK = got.ids_TK[here_T], got.weights_TK[here_T]
        kept_TK = ids_TK < config.moe.num_experts
        assert (kept_TK.sum(axis=1) == k).all() and not weights_TK[~kept_TK].any()
        np.testing.assert_array_equal(ids_TK[kept_TK], want.ids_TK[here_T].ravel())
        np.testing.assert_allclose(
            weights_TK[kept_TK], want.weights_TK[here_T].ravel(), rtol=1e-6
        )


@functools.cache
def resident() -> ResidentEngine:
    return ResidentEngine(load_weights(StoreReader(SPLITS["pattern"])))


@functools.cache
def alone():
    """What each row gets by itself, from an engine whose K it is."""
    return {
        each.id: run(RowSlots(resident().at_k(each.k), **SIZES), [(0, each)])
        for each in ROWS
    }


@pytest.mark.parametrize(
    "mode",
    [
        "resident",
        pytest.param("waves", marks=pytest.mark.slow),
        pytest.param("fused", marks=pytest.mark.slow),
    ],
)
def test_rows_of_different_k_get_what_they_get_alone(mode):
    engine = resident()
    if mode != "resident":
        options = OffloadOptions(**OPTIONS[mode])
        engine = make_offloaded(StoreReader(SPLITS["pattern"]), options)
    with engine:
        got = run(RowSlots(engine, **SIZES), ARRIVALS)
    for each in ROWS:
        expected = alone()[each.id]
        assert tokens_of(got)[each.id] == tokens_of(expected)[each.id]
        np.testing.assert_allclose(
            log_probs_of(got)[each.id], log_probs_of(expected)[each.id], atol=2e-5
        )
    # The prompts differ, and so does what a K gives.
    other = RowSlots(resident(), **SIZES)
    swapped = run(other, [(0, row(4, LENGTHS[4], 8, k=6, top_logprobs=3))])
    assert np.abs(log_probs_of(swapped)[4] - log_probs_of(got)[4]).max() > 1e-3

"""The kernel of frozen experts against the dense form of the same sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.engine.weights import to_device
from moe_edge.model.experts import run_experts
from moe_edge.model.record import RecordLayout
from moe_edge.training.frozen_experts import frozen_experts
from tests.support.tiny_models import BF16

E, K, T = 6, 3, 70


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize(
    ("has_bias", "activation"),
    [(False, ("silu", None)), (False, ("gelu", None)), (True, ("clamped_swiglu", 2.0))],
)
def test_frozen_experts_values_and_gradients_match_reference(
    has_bias, activation, dtype
):
    layout = RecordLayout(d_model=12, expert_dim=5, has_bias=has_bias)
    rng = np.random.default_rng(0)
    ids_TK = np.stack([rng.permutation(E)[:K] for _ in range(T)]).astype(np.int32)
    x_TD = jnp.array(rng.standard_normal((T, 12)), jnp.float32)
    weights_TK = jnp.array(rng.random((T, K)), jnp.float32)
    records = rng.standard_normal((E, layout.size)).astype(np.float32).astype(dtype)
    experts_ER, target_TD = to_device(records), jnp.cos(x_TD)

    def gradients(run):
        def value(x_TD, weights_TK):
            return (run(x_TD, weights_TK) * target_TD).sum()

        return jax.jit(jax.value_and_grad(value, argnums=(0, 1)))(x_TD, weights_TK)

    def dense(x_TD, weights_TK):
        kind, limit = activation
        return run_experts(
            x_TD,
            jnp.array(ids_TK),
            weights_TK,
            experts_ER,
            layout,
            activation=kind,
            swiglu_limit=limit,
            method="dense",
        )

    def ours(x_TD, weights_TK):
        ids = jnp.array(ids_TK)
        return frozen_experts(x_TD, ids, weights_TK, experts_ER, layout, activation)

    got, want = gradients(ours), gradients(dense)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-4)
    for ours_g, dense_g in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(ours_g, dense_g, rtol=1e-4, atol=1e-4)

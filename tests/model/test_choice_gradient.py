"""The gradient of a choice: ones forward, a log share's gradient backward."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.model import choice_gradient

VALUES = np.array([[0.5, 2.0, 1.5, 0.0], [3.0, 1.0, 4.0, 0.5]], np.float32)
CHOSEN = np.array([[1, 2], [2, 0]], np.int32)
LOSSES = np.array([[1.0, -2.0], [0.5, 3.0]], np.float32)  # by each chosen block


def weighed(logs_TB):
    factor_TK = choice_gradient.choice_factors(jnp.exp(logs_TB), CHOSEN)
    return (LOSSES * factor_TK).sum(), factor_TK


def test_factors_are_ones_with_the_gradient_of_log_shares():
    logs_TB = np.log(np.maximum(VALUES, 1e-30))
    run = choice_gradient.within(jax.value_and_grad(weighed, has_aux=True))
    (_, factor_TK), got_TB = jax.jit(run)(logs_TB)
    assert (factor_TK == 1).all()
    share_TB = VALUES / VALUES.sum(axis=1, keepdims=True)
    want_TB = -share_TB * LOSSES.sum(axis=1, keepdims=True)
    np.put_along_axis(
        want_TB, CHOSEN, np.take_along_axis(want_TB, CHOSEN, 1) + LOSSES, 1
    )
    np.testing.assert_allclose(got_TB, want_TB, atol=1e-6)


def test_there_are_none_elsewhere():
    assert choice_gradient.choice_factors(VALUES, CHOSEN) is None
    inside = choice_gradient.within(choice_gradient.choice_factors)
    assert (inside(VALUES, CHOSEN) == 1).all()
    assert choice_gradient.choice_factors(VALUES, CHOSEN) is None

"""What the branches of a layer give, and how it joins the residual stream.

Engines cut layers into programs between a branch and here: so all round alike.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moe_edge.core.float32 import rounded
from moe_edge.model.config import ModelConfig
from moe_edge.model.layers import norm

# Keeps what lies before it out of the fusions of what follows.
seam = jax.lax.optimization_barrier


class Norm(NamedTuple):
    """Weights of a norm."""

    scale_D: jax.Array
    bias_D: jax.Array | None  # None: by root mean square


class Shared(NamedTuple):
    """What a layer adds to the routed experts' output; None where there is none."""

    mlp_TD: jax.Array | None  # the shared expert's, before its gate
    logit_T1: jax.Array | None
    after: Norm | None = None  # of the sum
    own_after: tuple[Norm, Norm] | None = None  # of the experts' output, of mlp_TD
    scale_1: jax.Array | None = None  # of the residual stream after the layer
    ids_T1: jax.Array | None = None  # int32, none below 0: for `rounded`


def leave_branch(config: ModelConfig, y, after: Norm | None) -> jax.Array:
    """A branch's output as it is added to the residual stream: normed, scaled."""
    if after is not None:
        y = norm(y, after.scale_D, after.bias_D, config.norm_eps)
    return y if config.residual_scale == 1 else y * jnp.float32(config.residual_scale)


def add_experts(config: ModelConfig, x_BSD, y_TD, shared: Shared) -> jax.Array:
    """The residual stream with the routed and the shared experts' outputs.

    The gate is applied together with the sums, because XLA joins a product and a sum
    into one rounding wherever it sees both: so all engines round alike.
    """
    if shared.own_after is not None:
        y_TD = norm(y_TD, *shared.own_after[0], config.norm_eps)
    if shared.mlp_TD is not None:
        shared_TD = shared.mlp_TD
        if shared.own_after is not None:
            shared_TD = norm(shared_TD, *shared.own_after[1], config.norm_eps)
        if shared.logit_T1 is not None:
            shared_TD = shared_TD * jax.nn.sigmoid(shared.logit_T1)
        y_TD = y_TD + shared_TD
    y_TD = leave_branch(config, y_TD, shared.after)
    x_BSD = x_BSD + y_TD.reshape(x_BSD.shape)
    if shared.scale_1 is None:
        return x_BSD
    number_BS1 = shared.ids_T1.reshape(*x_BSD.shape[:-1], 1)
    return rounded(x_BSD * shared.scale_1.reshape(1, 1, 1), number_BS1)

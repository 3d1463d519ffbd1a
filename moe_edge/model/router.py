"""The router: which experts compute a token, and with what weight.

Rules by family: softmax then top-k (OLMoE, Mixtral, Qwen, DeepSeek-V2, optionally
limited to the best groups), sigmoid with a choice-only bias (DeepSeek-V3, arXiv
2412.19437, section 2.1.2), softmax over the chosen logits (gpt-oss).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moe_edge.model.config import ModelConfig, MoeConfig
from moe_edge.model.layers import add_bias, new_matrix, new_zeros
from moe_edge.model.matvec import linear


class Routing(NamedTuple):
    """What a router decided for T tokens."""

    ids_TK: jax.Array  # int32, best first; ties go to the lower id
    weights_TK: jax.Array  # float32, as multiplied onto the experts' outputs
    scores_TE: jax.Array  # float32, all experts, before any choice


def keep_best_groups(choice_TE: jax.Array, moe: MoeConfig) -> jax.Array:
    """Masks with -inf every expert outside the `topk_groups` best groups.

    A group's score is its best expert ("max") or the sum of its best two ("top2").
    """
    T, E = choice_TE.shape
    grouped = choice_TE.reshape(T, moe.num_groups, -1)
    if moe.group_score == "max":
        score = jnp.max(grouped, axis=-1)
    else:
        score = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
    _, best = jax.lax.top_k(score, moe.topk_groups)
    groups = jnp.arange(moe.num_groups).reshape(1, -1, 1)
    kept = jnp.any(groups == best[:, None, :], axis=-1)
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(T, E)


def choose(logits_TE: jax.Array, moe: MoeConfig, correction_E=None) -> Routing:
    """Applies the family's rule to router logits.

    Args:
      logits_TE: float32.
      moe: the rule.
      correction_E: float32 bias that changes the choice but not the weights.
    """
    if moe.scoring == "softmax_topk":
        top, ids = jax.lax.top_k(logits_TE, moe.top_k)
        return Routing(ids, jax.nn.softmax(top, axis=-1), logits_TE)
    if moe.scoring == "sigmoid":
        scores = jax.nn.sigmoid(logits_TE)
    else:
        scores = jax.nn.softmax(logits_TE, axis=-1)
    choice = scores
    if correction_E is not None:
        choice = choice + correction_E.astype(jnp.float32).reshape(1, -1)
    if moe.num_groups > 1:
        choice = keep_best_groups(choice, moe)
    _, ids = jax.lax.top_k(choice, moe.top_k)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if moe.norm_topk:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return Routing(ids, weights * moe.routed_scaling, scores)


class Router(nnx.Module):
    """Router weights of one layer."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        moe = config.moe
        self.moe = moe
        self.weight = new_matrix(rngs, moe.num_experts, config.d_model)
        if moe.router_bias:
            self.bias = new_zeros(moe.num_experts)
        if moe.correction_bias:
            self.correction_bias = new_zeros(moe.num_experts)

    def __call__(self, x_TD: jax.Array) -> Routing:
        """Args: x_TD float32, the normed hidden state."""
        logits = linear(x_TD, self.weight[...])
        logits = add_bias(logits, self.bias if self.moe.router_bias else None)
        correction = self.correction_bias[...] if self.moe.correction_bias else None
        return choose(logits, self.moe, correction)

"""The router: which experts compute a token, and with what weight.

Rules by family: softmax then top-k (OLMoE, Mixtral, Qwen, DeepSeek-V2, optionally
limited to the best groups), sigmoid with a choice-only bias (DeepSeek-V3, arXiv
2412.19437, section 2.1.2), softmax over the chosen logits (gpt-oss), SparseMixer
(Phi-3.5-MoE, arXiv 2409.12136).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moe_edge.kernels import native, rows
from moe_edge.model.calibrated_gate import predicted_levels
from moe_edge.model.config import ModelConfig, MoeConfig
from moe_edge.model.layers import add_bias, add_params
from moe_edge.model.matvec import linear
from moe_edge.model.proxy_gate import (
    GateNeurons,
    block_levels,
    block_ranks,
    choose_blocks,
)
from moe_edge.model.shapes import router_shapes


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


def choose(
    logits_TE: jax.Array, moe: MoeConfig, correction_E=None, k_T=None, removed_TR=None
) -> Routing:
    """Applies the family's rule to router logits; on a GPU in one kernel, unless
    groups of experts are chosen first, experts were pruned whose logits still count, or
    the rule is SparseMixer's.

    Args:
      logits_TE: float32.
      moe: the rule.
      correction_E: float32 bias that changes the choice but not the weights.
      k_T: int32, how many experts each token takes, 0..top_k; ranks beyond get id E
        and weight 0. None: all take top_k.
      removed_TR: logits of pruned experts, which have shares of the softmax, too.
    """
    in_kernel = moe.num_groups == 1 and moe.scoring != "sparsemixer"
    if removed_TR is not None or not (rows.are_wanted() and in_kernel):
        k_T1 = None if k_T is None else k_T[:, None]
        more = {"removed_TR": removed_TR, "pick": _pick}
        return _choose(logits_TE, moe, correction_E, k_T1, **more)
    E, K = moe.num_experts, moe.top_k
    given = {"logits_TE": (logits_TE, -jnp.inf)}
    if correction_E is not None:
        # -inf: nothing beyond the last expert is chosen.
        given["correction_E"] = correction_E.astype(jnp.float32)[None], -jnp.inf
    if k_T is not None:
        given["k_T1"] = k_T[:, None], 0

    def row(*values):
        values = dict(zip(given, values, strict=True))
        # Ranks are filled up, too: a k cuts them off.
        values.setdefault("k_T1", jnp.full((1, 1), K, jnp.int32))
        return _choose(moe=moe, pick=rows.pick, **values)

    kinds = (K, jnp.int32), (K, jnp.float32), (E, jnp.float32)
    return Routing(*rows.per_row(row, [*given.values()], kinds))


def _choose(
    logits_TE, moe: MoeConfig, correction_E=None, k_T1=None, *, pick, removed_TR=None
) -> Routing:
    """`choose`, also inside a kernel, which has its own way to `pick` the best."""
    if moe.scoring == "softmax_topk":
        ids, top = pick(logits_TE, logits_TE, moe.top_k)
        weights = jax.nn.softmax(_cut(top, k_T1, -jnp.inf), axis=-1)
        weights = _cut(weights, k_T1, 0.0)  # a k of 0 leaves none to divide by
        return Routing(_cut(ids, k_T1, moe.num_experts), weights, logits_TE)
    if moe.scoring == "sparsemixer":
        ids, top = pick(logits_TE, logits_TE, moe.top_k)
        weights = _cut(_sparsemixer_weights(logits_TE, ids, top, moe), k_T1, 0.0)
        scores = jax.nn.softmax(logits_TE, axis=-1)
        return Routing(_cut(ids, k_T1, moe.num_experts), weights, scores)
    if moe.scoring == "sigmoid":
        scores = jax.nn.sigmoid(logits_TE)
    elif removed_TR is not None:
        all_TE = jnp.concatenate([logits_TE, removed_TR], axis=-1)
        scores = jax.nn.softmax(all_TE, axis=-1)[:, : logits_TE.shape[1]]
    else:
        scores = jax.nn.softmax(logits_TE, axis=-1)
    # Of scores that round to 1 the largest logit is chosen.
    choice = logits_TE if moe.input_scaled else scores
    if correction_E is not None:
        choice = choice + correction_E.astype(jnp.float32).reshape(1, -1)
    if moe.num_groups > 1:
        choice = keep_best_groups(choice, moe)
    ids, weights = pick(choice, scores, moe.top_k)
    weights = jnp.ones_like(weights) if moe.input_scaled else weights
    weights = _cut(weights, k_T1, 0.0)
    if moe.norm_topk:
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights / (total + moe.norm_epsilon)
    ids = _cut(ids, k_T1, moe.num_experts)
    return Routing(ids, weights * moe.routed_scaling, scores)


def _sparsemixer_weights(logits_TE, ids_TK, top_TK, moe: MoeConfig) -> jax.Array:
    """Each chosen expert's part of a softmax over itself and those nearly as good, but
    for those chosen before it; the sub-experts of a parent are one choice.

    Args:
      top_TK: the logits of the chosen, best first.
    """
    experts_1E, weights_TK = jnp.arange(logits_TE.shape[1]).reshape(1, -1), []
    is_free_TE = jnp.ones(logits_TE.shape, bool)
    for rank in range(moe.top_k):
        top_T1 = top_TK[:, rank : rank + 1]
        distance_TE = (top_T1 - logits_TE) / jnp.maximum(jnp.abs(logits_TE), top_T1)
        # Not `<=`: 0 / 0 of two zeros is near.
        is_near_TE = is_free_TE & ~(distance_TE > 2 * moe.nearness)
        parts_TE = jnp.where(is_near_TE, jnp.exp(logits_TE - top_T1), 0.0)
        weights_TK.append(1.0 / jnp.sum(parts_TE, axis=-1, keepdims=True))
        if (rank + 1) % moe.sub_experts == 0:
            before_T1K = ids_TK[:, None, : rank + 1]
            is_free_TE = (experts_1E[..., None] != before_T1K).all(axis=-1)
    return jnp.concatenate(weights_TK, axis=1)


def _pick(choice_TE, values_TE, k: int) -> tuple[jax.Array, jax.Array]:
    """Ids of the k best, best first, and their values; ties go to the lower id."""
    if native.suits(0, choice_TE):
        ids_TK = native.top_k(choice_TE, k)
    else:
        ids_TK = jax.lax.top_k(choice_TE, k)[1]
    return ids_TK, jnp.take_along_axis(values_TE, ids_TK, axis=-1)


def _cut(values_TK, k_T1, beyond, ranks_K=None) -> jax.Array:
    """The values, `beyond` for ranks of k and more; all of them without k."""
    if k_T1 is None:
        return values_TK
    if ranks_K is None:
        ranks_K = jnp.arange(values_TK.shape[1], dtype=jnp.int32)
    return jnp.where(ranks_K[None] < k_T1, values_TK, beyond)


class Router(nnx.Module):
    """Router weights of one layer."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.moe = config.moe
        add_params(self, router_shapes(config), rngs)

    def __call__(self, x_TD: jax.Array, k_T: jax.Array | None = None) -> Routing:
        """Routes tokens.

        Args:
          x_TD: float32, the normed hidden state.
          k_T: int32, how many blocks each token takes, as of `choose`.
        """
        moe = self.moe
        if moe.own_norms:
            scale_D = self.input_scale[...].astype(jnp.float32)[None]
            x_TD = x_TD * scale_D * jnp.float32(x_TD.shape[-1] ** -0.5)
        logits = linear(x_TD, self.weight[...])
        logits = add_bias(logits, self.bias if moe.router_bias else None)
        correction = self.correction_bias[...] if moe.correction_bias else None
        if not moe.keeps_router:
            removed = self._removed(x_TD)
            return self._scaled(choose(logits, moe, correction, k_T, removed))
        parents = choose(logits, parent_rule(moe), correction)
        levels_TPU = self._levels(x_TD, parents.ids_TK)
        ids_TK, weights_TK = choose_blocks(
            parents.ids_TK, parents.weights_TK, levels_TPU, moe
        )
        if k_T is not None:
            ranks_K, k_T1 = jnp.asarray(block_ranks(moe)), k_T[:, None]
            ids_TK = _cut(ids_TK, k_T1, moe.num_experts, ranks_K)
            weights_TK = _cut(weights_TK, k_T1, 0.0, ranks_K)
        return Routing(ids_TK, weights_TK, block_scores(parents, levels_TPU, moe))

    def _removed(self, x_TD: jax.Array) -> jax.Array | None:
        """Logits of pruned experts that keep their shares of the softmax."""
        if not self.moe.removed_experts:
            return None
        bias = self.removed_bias if self.moe.router_bias else None
        return add_bias(linear(x_TD, self.removed_weight[...]), bias)

    def _scaled(self, routing: Routing) -> Routing:
        """The weights times the factors of their experts, if these have some."""
        if not self.moe.expert_scale:
            return routing
        ids_TK = jnp.minimum(routing.ids_TK, self.moe.num_experts - 1)
        scale_TK = self.expert_scale[...].astype(jnp.float32)[ids_TK]
        return routing._replace(weights_TK=routing.weights_TK * scale_TK)

    def _levels(self, x_TD: jax.Array, parents_TP: jax.Array) -> jax.Array:
        """How active each block of the chosen parents should be: `[T, P, U]`."""
        moe, biases = self.moe, (None, None)
        if moe.gate == "calibrated":
            linear_rows = self.level_weight[...], self.level_bias[...]
            return predicted_levels(x_TD, parents_TP, *linear_rows, moe)
        if moe.expert_bias:
            biases = self.proxy_gate_bias[...], self.proxy_up_bias[...]
        neurons = GateNeurons(
            self.proxy_gate[...],
            self.proxy_up[...],
            *biases,
            self.proxy_scale[...],
            self.proxy_prior[...],
        )
        return block_levels(x_TD, parents_TP, neurons, moe)


def parent_rule(moe: MoeConfig) -> MoeConfig:
    """The rule by which parents are chosen before their blocks: that of the model
    before the split."""
    return dataclasses.replace(
        moe,
        num_experts=moe.num_parents,
        top_k=moe.parent_top_k,
        expert_dim=moe.expert_dim * moe.sub_experts,
        sub_experts=1,
        gate="linear",
        gate_neurons=0,
        rank_shares=(),
    )


def block_scores(parents: Routing, levels_TPU: jax.Array, moe: MoeConfig) -> jax.Array:
    """Scores of all blocks `[T, E * U]`: a parent's score, shared out by level.

    Blocks of parents that were not chosen have no level: they share equally. Logits
    (softmax_topk) stay logits: the shares of a parent's blocks add up to its own.
    """
    T, U = levels_TPU.shape[0], moe.sub_experts
    total_TP1 = jnp.sum(levels_TPU, axis=-1, keepdims=True)
    share_TPU = (levels_TPU + 1e-20) / (total_TP1 + 1e-20 * U)
    share_TEU = jnp.full((T, moe.num_parents, U), 1 / U, jnp.float32)
    row_T1 = jnp.arange(T).reshape(-1, 1)
    share_TEU = share_TEU.at[row_T1, parents.ids_TK].set(share_TPU)
    score_TE1 = parents.scores_TE[..., None]
    if moe.scoring == "softmax_topk":
        scores_TEU = score_TE1 + jnp.log(share_TEU)
    else:
        scores_TEU = score_TE1 * share_TEU
    return scores_TEU.reshape(T, -1)

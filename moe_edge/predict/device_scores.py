"""What predictors compute on the device: the routers of later layers, run ahead.

Pure functions: an engine calls them inside the program that attends and routes, so that
a prediction comes with the read-back of the layer's own routing. Their predictors are
in `stale_gate.py` and `probe.py`, which load without JAX.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from moe_edge.model.config import ModelConfig, MoeConfig
from moe_edge.model.kv_cache import Cache
from moe_edge.model.matvec import linear
from moe_edge.model.router import Router, choose
from moe_edge.model.transformer import Block, Chunk
from moe_edge.predict.base import NOT_WANTED

Flat = Mapping[str, jax.Array]


def wanted_scores(
    ids_TK: jax.Array, scores_TE: jax.Array, moe: MoeConfig, top_a: float | None = None
) -> jax.Array:
    """What a batch's routing asks for.

    Args:
      ids_TK: chosen experts; E is padding.
      scores_TE: the router's scores (logits are turned into probabilities).
      top_a: with it, only top-score experts: score >= (1 + top_a) times the token's
        (k+1)-th highest score (SMoE, section IV.B).
    Returns:
      float32 [E], the largest score among the tokens that choose an expert, else
      `NOT_WANTED`.
    """
    E, K = scores_TE.shape[1], ids_TK.shape[1]
    if moe.scoring == "softmax_topk":
        scores_TE = jax.nn.softmax(scores_TE, axis=-1)
    wanted_TE = (ids_TK[:, :, None] == jnp.arange(E).reshape(1, 1, -1)).any(axis=1)
    if top_a is not None and K < E:
        next_T1 = jax.lax.top_k(scores_TE, K + 1)[0][:, K:]
        wanted_TE &= scores_TE >= (1 + top_a) * next_T1
    return jnp.where(wanted_TE, scores_TE, NOT_WANTED).max(axis=0)


def scores_ahead(
    config: ModelConfig, gates: Sequence[Flat], hidden_TD, taken_TD, k_T
) -> jax.Array:
    """What later routers would choose, judged by this layer's state.

    Args:
      gates: of the later layers, `GatePredictor.gates_after` or `Probe.gates_after`.
      hidden_TD: float32, the normed state that this layer's router sees.
      taken_TD: the same, that its experts take: what probes are fitted on.
      k_T: int32, how many experts each token takes: 0 if it is padding.
    Returns:
      float32 `[N, E]`, a row per gate: see `wanted_scores`.
    """
    graph = nnx.split(nnx.eval_shape(lambda: Router(config, nnx.Rngs(0))))[0]

    def probe(gate):
        """The router's rule without weights: the largest values are chosen."""
        read_TR = linear(taken_TD, gate["probe"]) + gate["probe_bias"][None]
        E, N = gate["probe_out"].shape
        values_TE, gate_TN, up_TN = jnp.split(read_TR, (E, E + N), axis=1)
        values_TE += linear(jax.nn.silu(gate_TN) * up_TN, gate["probe_out"])
        plain = MoeConfig(
            num_experts=config.moe.num_experts,
            top_k=config.moe.top_k,
            expert_dim=config.moe.expert_dim,
        )
        # By the values as they are; scores keep their order and are never below 0.
        ranked = dataclasses.replace(plain, scoring="softmax_topk")
        routing = choose(values_TE, ranked, k_T=k_T)
        return wanted_scores(routing.ids_TK, jax.nn.softplus(values_TE), plain)

    def run(gate):
        if "probe" in gate:
            return probe(gate)
        params = [
            (tuple(name.split(".")[1:]), nnx.Param(array))
            for name, array in gate.items()
            if name.startswith("router.")
        ]
        router = nnx.merge(graph, nnx.from_flat_state(params))
        state_TD = hidden_TD * gate["scale"][None]
        if "shift" in gate:
            state_TD += gate["shift"][None]
        routing = router(state_TD, k_T)
        return wanted_scores(routing.ids_TK, routing.scores_TE, config.moe)

    return jnp.stack([run(gate) for gate in gates])


def partial_gate(
    block: Block,
    x_BSD: jax.Array,
    chunk: Chunk,
    window: jax.Array,
    cache,
    top_a: float | None = None,
) -> tuple[jax.Array, Cache]:
    """What layer l + 1, a MoE layer, would choose on a partial state.

    Args:
      block: of layer l + 1, bound to its weights.
      x_BSD: float32 residual stream after layer l without its absent experts.
      chunk: positions and padding, those of layer l.
      window: of layer l + 1.
      cache: keys and values of layer l + 1 before this step.
      top_a: as in `wanted_scores`.
    Returns:
      (float32 [E] of `wanted_scores`; the cache with the keys and values of the partial
      state. A program that drops it must not donate `cache`, one that goes on writes
      the same positions again, so it needs no copy. States that no position names have
      moved on, so those are to be dropped).
    """
    attended, cache = block.attend(x_BSD, chunk, window, cache)
    _, routing = block.route(attended.normed_BSD, chunk)
    given = routing.ids_TK, routing.scores_TE, block.router.moe, top_a
    return wanted_scores(*given), cache

"""One training step and one evaluation step, as pure jitted functions.

Parameters are a flat dict: dense weights under their canonical paths
(`blocks.0.attn.q`) and each layer's expert records as `experts.0`. The learning rate
is an argument, so that a schedule never recompiles.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from moe_edge.kernels import gradients
from moe_edge.model.config import ModelConfig
from moe_edge.model.transformer import Transformer
from moe_edge.training.expert_grad import expert_fn
from moe_edge.training.options import Hyper
from moe_edge.training.start import Params


class TrainState(NamedTuple):
    """What a checkpoint holds, in addition to the position in the data."""

    params: Params
    optimizer: Any


def model_fn(config: ModelConfig, *, frozen: bool = False) -> Callable:
    """`run(dense, experts, tokens_BS, at_P) -> (logits, routings)` of a config.

    `dense` are arrays by path, `experts` the records of each layer; a config with
    another `top_k` runs the same ones. Logits are of every position or of `at_P`
    (`Transformer.__call__`).

    Args:
      frozen: the experts get no gradient.
    """
    model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
    graph, state = nnx.split(model)
    paths = [path for path, _ in nnx.to_flat_state(state)]
    run_experts = expert_fn(config, frozen=frozen)

    def run(dense: Params, experts: Sequence[jax.Array | None], tokens_BS, at_P=None):
        leaves = [(p, nnx.Param(dense[".".join(map(str, p))])) for p in paths]
        bound = nnx.merge(graph, nnx.from_flat_state(leaves))
        return bound(tokens_BS, experts, run_experts, at_P=at_P)

    return run


def forward_fn(config: ModelConfig) -> Callable:
    """`forward(params, tokens_BS, at_P) -> (logits, routings)`; see `model_fn`."""
    run = model_fn(config)

    def forward(params: Params, tokens_BS, at_P=None):
        experts = [params.get(f"experts.{layer}") for layer in range(config.num_layers)]
        return run(params, experts, tokens_BS, at_P)

    return forward


def token_losses(logits, targets) -> jax.Array:
    """Cross-entropy of every target, nats: [..., V] and [...] -> [...]."""
    gold = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - gold


def mean_loss(forward: Callable, params: Params, rows, weights_BS=None):
    """(loss, routings): cross-entropy of all targets, or of those that have weight.

    Logits of the others are not computed: the head is a quarter of the default model's
    products. At most a quarter of the targets is learnt, those of the largest weights.
    The loss of a batch without weights is 0.
    """
    tokens_BS, targets_BS = rows[:, :-1], rows[:, 1:]
    if weights_BS is None:
        logits_BSV, routings = forward(params, tokens_BS)
        return token_losses(logits_BSV, targets_BS).mean(), routings
    weights_P, at_P = jax.lax.top_k(weights_BS.reshape(-1), -(-weights_BS.size // 4))
    logits_PV, routings = forward(params, tokens_BS, at_P)
    losses_P = token_losses(logits_PV, targets_BS.reshape(-1)[at_P])
    total = jnp.maximum(weights_P.sum(), jnp.finfo(weights_P.dtype).tiny)
    return (losses_P * weights_P).sum() / total, routings


def expert_counts(ids_TK, rows: int, experts: int) -> jax.Array:
    """How often each row of the batch chose each expert: int32 [rows, E]."""
    row_T1 = jnp.arange(ids_TK.shape[0])[:, None] // (ids_TK.shape[0] // rows)
    row_TK = jnp.broadcast_to(row_T1, ids_TK.shape)
    return jnp.zeros((rows, experts), jnp.int32).at[row_TK, ids_TK].add(1)


def balance_loss(counts_E, scores_TE) -> jax.Array:
    """E * sum(share of choices * mean score): 1 when both are uniform."""
    counts_E = counts_E.astype(jnp.float32)
    share_E = counts_E / counts_E.sum()
    return share_E.shape[0] * (share_E * scores_TE.mean(axis=0)).sum()


def _decayed(params: Params) -> dict[str, bool]:
    return {name: value.ndim > 1 for name, value in params.items()}


def make_optimizer(hyper: Hyper) -> optax.GradientTransformation:
    """AdamW without its learning rate, which the step multiplies in."""
    return optax.chain(
        optax.clip_by_global_norm(hyper.clip_norm),
        optax.scale_by_adam(b1=hyper.beta1, b2=hyper.beta2),
        optax.add_decayed_weights(hyper.weight_decay, mask=_decayed),
    )


def make_train_step(config: ModelConfig, hyper: Hyper) -> Callable:
    """`step(state, rows, learning_rate, weights_BS) -> (state, metrics)`.

    The state is donated. `rows` is int32 [B, S + 1]; `weights_BS` are those of targets
    in the loss (`mean_loss`), all alike where it is left out or None. Metrics: loss
    (cross-entropy), balance, grad_norm, counts_LE (choices of this batch).
    """
    forward = forward_fn(config)
    optimizer = make_optimizer(hyper)
    experts = config.moe.num_experts

    def rate_of(name: str) -> float:
        return hyper.expert_rate_factor if name.startswith("experts.") else 1.0

    def loss_fn(params, rows, weights_BS):
        loss, routings = mean_loss(forward, params, rows, weights_BS)
        routings = [r for r in routings if r is not None]
        counts = [expert_counts(r.ids_TK, 1, experts)[0] for r in routings]
        balance = sum(
            balance_loss(c, r.scores_TE) for c, r in zip(counts, routings, strict=True)
        ) / len(routings)
        total = loss + hyper.balance * balance
        return total, (loss, balance, jnp.stack(counts))

    def step(state: TrainState, rows, learning_rate, weights_BS=None):
        grads, (loss, balance, counts_LE) = jax.grad(loss_fn, has_aux=True)(
            state.params, rows, weights_BS
        )
        with jax.numpy_dtype_promotion("standard"):  # optax mixes float and int
            updates, new_optimizer = optimizer.update(
                grads, state.optimizer, state.params
            )
        params = {
            name: value - learning_rate * rate_of(name) * updates[name]
            for name, value in state.params.items()
        }
        metrics = {
            "loss": loss,
            "balance": balance,
            "grad_norm": optax.tree.norm(grads),
            "counts_LE": counts_LE,
        }
        return TrainState(params, new_optimizer), metrics

    return jax.jit(gradients.within(step), donate_argnums=0)


def make_answer_step(config: ModelConfig) -> Callable:
    """`right(params, rows, weights_BS) -> bool [B]`: every target with weight is best.

    The answer that greedy decoding would write is then the right one.
    """
    forward = forward_fn(config)

    def right(params, rows, weights_BS):
        logits, _ = forward(params, rows[:, :-1])
        hit_BS = logits.argmax(axis=-1) == rows[:, 1:]
        return (hit_BS | (weights_BS == 0)).all(axis=1)

    return jax.jit(gradients.within(right))


def make_eval_step(config: ModelConfig) -> Callable:
    """`evaluate(params, rows) -> (nats_B summed over the row, counts_BLE)`."""
    forward = forward_fn(config)

    def evaluate(params, rows):
        logits, routings = forward(params, rows[:, :-1])
        counts = [
            expert_counts(r.ids_TK, rows.shape[0], config.moe.num_experts)
            for r in routings
            if r is not None
        ]
        return token_losses(logits, rows[:, 1:]).sum(axis=1), jnp.stack(counts, axis=1)

    return jax.jit(gradients.within(evaluate))

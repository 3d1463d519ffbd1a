"""Programs of router fine-tuning: a gradient step per K, and the optimiser's update.

The rows that choose are the only differentiated argument: the router's with a linear
gate, those that predict levels with a calibrated one. Everything else enters in its
stored dtype, so that no gradient, optimiser state or float32 copy of it is ever made.
A `k`'s gradient step is compiled once; the update does not depend on `k`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from moe_edge.checkpoint.schema import dense_items, item_shapes
from moe_edge.core.float32 import to_float32
from moe_edge.engine.weights import Weights
from moe_edge.kernels import gradients
from moe_edge.model import soft_choice
from moe_edge.model.config import ModelConfig
from moe_edge.model.matvec import compiler_options
from moe_edge.model.record import RecordLayout
from moe_edge.training.step import TrainState, model_fn, token_losses

# Rows that are trained, by gate: those that choose, and nothing else.
TRAINED = {
    "linear": ("router.weight", "router.bias"),
    "calibrated": ("router.level_weight", "router.level_bias"),
}
RouterWeights = dict[str, jax.Array]  # "blocks.0.router.weight" -> float32


class Frozen(NamedTuple):
    """All that is not trained."""

    dense: dict[str, jax.Array]  # by canonical path
    experts: tuple[jax.Array | None, ...]  # records of each layer


class Total(NamedTuple):
    """Sums over the batches of one optimiser step.

    Attributes:
      gradient: of the loss.
      nats: of the text; apart: KL(teacher || model), 0 without a teacher.
    """

    gradient: RouterWeights
    nats: jax.Array
    apart: jax.Array


def parameter_counts(config: ModelConfig) -> tuple[int, int]:
    """(trained, all) parameters of a model."""
    trained, total, names = 0, 0, TRAINED[config.moe.gate]
    for item in dense_items(config):
        for name, shape in item_shapes(config, item).items():
            total += math.prod(shape)
            trained += math.prod(shape) if name in names else 0
    records = len(config.moe_layers) * config.moe.num_experts
    return trained, total + records * RecordLayout.of(config).num_values


def split_weights(weights: Weights) -> tuple[RouterWeights, Frozen]:
    """The router's rows, widened to float32, and everything else as it is."""
    router, dense = {}, dict(weights.top)
    names = TRAINED[weights.config.moe.gate]
    for layer, flat in enumerate(weights.layers):
        for name, array in flat.items():
            path = f"blocks.{layer}.{name}"
            if name in names:
                router[path] = jnp.array(to_float32(array))
            else:
                dense[path] = array
    return router, Frozen(dense, weights.experts)


def logits_fn(config: ModelConfig) -> Callable:
    """`logits(router, frozen, ids)` at a config's top_k: [B, S, V] of int32 [B, S]."""
    run = model_fn(config, frozen=True)

    def logits(router: RouterWeights, frozen: Frozen, ids):
        return run(frozen.dense | router, frozen.experts, ids)[0]

    return logits


def nats_fn(config: ModelConfig) -> Callable:
    """`nats(router, frozen, rows)` at a config's top_k.

    It is the summed cross-entropy of int32 rows [B, S + 1].
    """
    logits = logits_fn(config)

    def nats(router: RouterWeights, frozen: Frozen, rows):
        found = logits(router, frozen, rows[:, :-1])
        return token_losses(found, rows[:, 1:]).sum()

    return nats


def loss_fn(config: ModelConfig, teacher: ModelConfig, weight: float) -> Callable:
    """`loss(router, frozen, rows, teacher_router) -> (loss, (nats, apart))`, sums.

    The loss is the cross-entropy, and `weight` times how far the model is apart from a
    teacher, KL(teacher || model): the same weights with rows and K of the teacher.
    """
    logits, teach = logits_fn(config), logits_fn(teacher)

    def loss(
        router: RouterWeights,
        frozen: Frozen,
        rows,
        teacher_router: RouterWeights | None,
    ):
        found = logits(router, frozen, rows[:, :-1])
        nats = token_losses(found, rows[:, 1:]).sum()
        if not weight:
            return nats, (nats, jnp.float32(0))
        taught = jax.nn.log_softmax(teach(teacher_router, frozen, rows[:, :-1]))
        taught = jax.lax.stop_gradient(taught)
        apart = (jnp.exp(taught) * (taught - jax.nn.log_softmax(found))).sum()
        return nats + weight * apart, (nats, apart)

    return loss


def make_eval_step(config: ModelConfig) -> Callable:
    """The jitted `nats_fn`."""
    nats = gradients.within(nats_fn(config))
    return jax.jit(nats, compiler_options=compiler_options())


def make_gradient_step(
    config: ModelConfig, teacher: ModelConfig | None = None, weight: float = 0.0
) -> Callable:
    """`step(total, router, frozen, rows, teacher_router) -> total`, of `loss_fn`.

    The total is donated; `teacher_router` is None where `weight` is 0.
    """
    loss = loss_fn(config, teacher or config, weight)

    def step(
        total: Total, router: RouterWeights, frozen: Frozen, rows, teacher_router=None
    ) -> Total:
        (_, sums), gradient = jax.value_and_grad(loss, has_aux=True)(
            router, frozen, rows, teacher_router
        )
        return jax.tree.map(jnp.add, total, Total(gradient, *sums))

    step = soft_choice.within(gradients.within(step))
    return jax.jit(step, donate_argnums=0, compiler_options=compiler_options())


def empty_total(router: RouterWeights) -> Total:
    """Sums of nothing."""
    return Total(jax.tree.map(jnp.zeros_like, router), jnp.float32(0), jnp.float32(0))


def make_optimizer(
    weight_decay: float, clip_norm: float
) -> optax.GradientTransformation:
    """AdamW without its learning rate, which the update multiplies in."""
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(weight_decay),
    )


def make_update(optimizer: optax.GradientTransformation) -> Callable:
    """`update(state, total, tokens, learning_rate) -> (state, nats, apart, norm)`.

    nats and apart: means over the tokens; norm: of the gradient.
    """

    def update(state: TrainState, total: Total, tokens, learning_rate):
        mean = jax.tree.map(lambda g: g / tokens, total.gradient)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes float and int
            updates, new = optimizer.update(mean, state.optimizer, state.params)
        params = {
            name: value - learning_rate * updates[name]
            for name, value in state.params.items()
        }
        means = total.nats / tokens, total.apart / tokens
        return TrainState(params, new), *means, optax.tree.norm(mean)

    return jax.jit(update, donate_argnums=0)

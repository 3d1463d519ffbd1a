"""Programs of router fine-tuning: their gradient, and that nothing else has one."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_edge.model.config import ModelConfig
from moe_edge.model.experts import run_experts
from moe_edge.model.record import RecordLayout
from moe_edge.model.sub_experts import at_k, split_config
from moe_edge.model.transformer import Transformer
from moe_edge.offload.store import device_dtype
from moe_edge.papers.moe_prism.refactor.finetune import step as programs
from moe_edge.training.step import TrainState
from tests.support.tiny_models import ALL, BF16, GQA, random_weights

ROWS = np.random.default_rng(3).integers(0, 61, (2, 14)).astype(np.int32)


def _reference(config: ModelConfig, router, frozen):
    """Mean cross-entropy through the plain Transformer, every expert dense."""
    graph, state = nnx.split(Transformer(config, nnx.Rngs(0)))
    layout, arrays = RecordLayout.of(config), frozen.dense | router
    leaves = [
        (path, nnx.Param(arrays[".".join(map(str, path))]))
        for path, _ in nnx.to_flat_state(state)
    ]

    def run(x_TD, ids_TK, weights_TK, experts_ER):
        return run_experts(
            *(x_TD, ids_TK, weights_TK, experts_ER, layout),
            activation=config.moe.activation,
            swiglu_limit=config.moe.swiglu_limit,
            method="dense",
        )

    bound = nnx.merge(graph, nnx.from_flat_state(leaves))
    logits, _ = bound(ROWS[:, :-1], frozen.experts, run)
    chosen = jnp.take_along_axis(
        jax.nn.log_softmax(logits), jnp.array(ROWS[:, 1:, None]), axis=-1
    )
    return -chosen.sum()


@functools.cache
def _case(name, k):
    """A model at K, its router, the rest, and the gradient, compiled once."""
    config = ALL[name]
    if name != "gqa":  # it has a dense layer; here two MoE layers do
        short = dataclasses.replace(config.attention, windows=(None, 9))
        config = dataclasses.replace(
            config, num_layers=2, dense_layers=(), attention=short
        )
    config = at_k(config, k)
    router, frozen = programs.split_weights(random_weights(config))
    total = programs.empty_total(router)
    got = programs.make_gradient_step(config)(total, router, frozen, ROWS)
    return config, router, frozen, got


# With all 12 experts chosen the loss is smooth in the router.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "k"),
    [("gqa", 12), ("mla", 2), ("gpt_oss", 3)],
)
def test_gradient_matches_jax_grad_of_plain_transformer(name, k):
    config, router, frozen, got = _case(name, k)
    want, want_grad = jax.jit(
        jax.value_and_grad(lambda router: _reference(config, router, frozen))
    )(router)
    np.testing.assert_allclose(got.nats, want, rtol=1e-5)
    assert set(got.gradient) == set(want_grad) == set(router)
    assert ("blocks.1.router.bias" in router) == (name == "gpt_oss")
    for path, gradient in want_grad.items():
        assert np.abs(gradient).max() > 1e-4
        np.testing.assert_allclose(
            got.gradient[path], gradient, rtol=2e-3, atol=2e-5, err_msg=path
        )


@pytest.mark.slow
def test_loss_of_a_teacher_is_nats_and_divergence():
    config, router, frozen, _ = _case("gqa", 2)
    teacher = at_k(config, 12)
    rows = ROWS[:, :7]
    loss = jax.jit(programs.loss_fn(config, teacher, 0.5))
    value, (nats, told) = loss(router, frozen, rows, router)
    mine, its = (
        jax.nn.log_softmax(jax.jit(programs.logits_fn(c))(router, frozen, rows[:, :-1]))
        for c in (config, teacher)
    )
    text_alone = jax.jit(programs.nats_fn(config))(router, frozen, rows)
    np.testing.assert_allclose(nats, text_alone, rtol=1e-6)
    apart = (np.exp(its) * (its - mine)).sum()
    assert apart > 0.01
    np.testing.assert_allclose(told, apart, rtol=1e-4)
    np.testing.assert_allclose(value, nats + 0.5 * apart, rtol=1e-5)


def test_a_model_that_is_its_own_teacher_learns_from_the_text_alone():
    config, router, frozen, got = _case("gqa", 12)
    step = programs.make_gradient_step(config, config, 3.0)
    taught = step(programs.empty_total(router), router, frozen, ROWS, router)
    np.testing.assert_allclose(taught.nats, got.nats, rtol=1e-6)
    for path, gradient in got.gradient.items():
        np.testing.assert_allclose(
            taught.gradient[path], gradient, rtol=2e-3, atol=2e-5, err_msg=path
        )


def test_gradient_matches_finite_differences():
    config, router, frozen, got = _case("gqa", 12)
    router = {path: np.asarray(array) for path, array in router.items()}
    nats = programs.make_eval_step(config)
    for path, array in router.items():
        gradient = np.asarray(got.gradient[path])
        slope = np.linalg.norm(gradient)
        up, down = (
            float(nats(router | {path: array + step / slope * gradient}, frozen, ROWS))
            for step in np.float32([0.05, -0.05])
        )
        np.testing.assert_allclose((up - down) / 0.1, slope, rtol=0.01)


def test_gradient_step_makes_no_gradient_of_frozen_arrays():
    router, frozen = programs.split_weights(random_weights(GQA))
    total = programs.empty_total(router)
    step = programs.make_gradient_step(GQA)
    jaxpr = step.trace(total, router, frozen, ROWS).jaxpr
    # Only gradients are products or sums that have the shape of a weight.
    frozen_shapes = {a.shape for a in jax.tree.leaves(frozen) if a.ndim > 1}
    made = _summed_shapes(jaxpr.jaxpr)
    assert (12, 40) in made  # the router's
    assert not frozen_shapes & made
    both = jax.grad(programs.nats_fn(GQA), argnums=(0, 1))
    made = _summed_shapes(jax.make_jaxpr(both)(router, frozen, ROWS).jaxpr)
    dense_shapes = {a.shape for a in frozen.dense.values() if a.ndim > 1}
    assert dense_shapes <= made  # so it would have been seen
    out = jax.eval_shape(step, total, router, frozen, ROWS)
    shapes = sorted(a.shape for a in jax.tree.leaves(out))
    assert shapes == [(), (), (12, 40), (12, 40)]


def test_frozen_arrays_stay_in_their_dtype_without_optimizer_state():
    router, frozen = programs.split_weights(random_weights(GQA, dtype=BF16))
    kinds = {a.dtype for a in jax.tree.leaves(frozen) if a.ndim > 1}
    assert kinds == {device_dtype(np.dtype(BF16))}
    state = programs.make_optimizer(0.0, 1.0).init(router)
    sizes = [leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert sizes == 4 * [12 * 40]  # two moments of two layers' rows


def _summed_shapes(jaxpr) -> set:
    """Shapes, and their transposes, of all products and scattered sums."""
    shapes = set()
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                shapes |= _summed_shapes(inner)
        if eqn.primitive.name in ("dot_general", "scatter-add"):
            shape = tuple(eqn.outvars[0].aval.shape)
            shapes |= {shape, shape[::-1]}
    return shapes


def test_update_is_adam_with_clipping():
    router = {"w": jnp.array([1.0, -2.0])}
    optimizer = programs.make_optimizer(weight_decay=0.5, clip_norm=1e9)
    state = TrainState(router, optimizer.init(router))
    total = programs.Total({"w": jnp.array([30.0, -60.0])}, *np.float32([20, 5]))
    state, loss, apart, norm = programs.make_update(optimizer)(
        state, total, np.float32(10.0), np.float32(0.1)
    )
    assert (float(loss), float(apart)) == (2.0, 0.5)
    np.testing.assert_allclose(norm, math.sqrt(45.0), rtol=1e-6)
    # The first step of Adam is the gradient's sign; the decay adds half the weight.
    np.testing.assert_allclose(
        state.params["w"], [1.0 - 0.1 * (1 + 0.5), -2.0 + 0.1 * (1 + 1.0)], rtol=1e-5
    )


def test_parameter_counts_at_olmoe_size_is_about_an_eighth_of_a_percent():
    # OLMoE-1B-7B: arXiv 2409.02060, table 1.
    attention = dataclasses.replace(
        GQA.attention,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        qkv_bias=False,
        qk_norm="full",
        windows=(),
    )
    moe = dataclasses.replace(
        GQA.moe,
        num_experts=64,
        top_k=8,
        expert_dim=1024,
        shared_dim=0,
        shared_gate=False,
    )
    olmoe = dataclasses.replace(
        GQA,
        vocab_size=50304,
        d_model=2048,
        num_layers=16,
        attention=attention,
        moe=moe,
        dense_layers=(),
        dense_dim=0,
    )
    assert programs.parameter_counts(olmoe)[1] == 6_919_161_856
    trained, total = programs.parameter_counts(split_config(olmoe, 4))
    assert trained == 16 * 256 * 2048
    assert round(100 * trained / total, 2) == 0.12


@pytest.mark.slow
def test_rows_that_choose_learn_which_blocks_the_whole_model_needs():
    """From random rows: KL to all blocks halves, with a choice as at run time."""
    whole = split_config(GQA, 4, gate="calibrated")
    config = at_k(whole, 5)
    rows = np.random.default_rng(3).integers(0, 61, (8, 33)).astype(np.int32)
    router, frozen = programs.split_weights(random_weights(whole))
    assert {path.rsplit(".", 1)[1] for path in router} == {"level_weight", "level_bias"}
    teacher = jax.tree.map(jnp.copy, router)
    hard = jax.jit(programs.loss_fn(config, whole, 1.0))

    def apart(router):
        return float(hard(router, frozen, rows, teacher)[1][1]) / rows[:, 1:].size

    before = apart(router)
    step = programs.make_gradient_step(config, whole, 1000.0)
    optimizer = programs.make_optimizer(0.0, 1.0)
    update = programs.make_update(optimizer)
    state = TrainState(router, optimizer.init(router))
    for _ in range(60):
        total = programs.empty_total(state.params)
        total = step(total, state.params, frozen, rows, teacher)
        tokens, rate = np.float32(rows[:, 1:].size), np.float32(1e-2)
        state, *_ = update(state, total, tokens, rate)
    assert apart(state.params) < 0.5 * before

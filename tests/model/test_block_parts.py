"""Norms around a branch and multipliers, each alone: against a model that says the same
with its weights, bit for bit where factors are powers of two."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from moe_edge.model.branches import add_experts
from moe_edge.model.experts import run_experts
from moe_edge.model.record import RecordLayout
from moe_edge.model.transformer import Block, Transformer, make_chunk
from tests.support.tiny_models import GQA, random_prompts, random_weights


@pytest.fixture(scope="module")
def weights():
    return random_weights(GQA)


def logits(config, weights, **changed):
    """Of a prompt, by the plain model; `changed`: arrays of the top."""
    tokens_BS = np.array(random_prompts(GQA, (7,)))
    model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
    flat = weights.top | changed
    for layer, arrays in enumerate(weights.layers):
        flat |= {f"blocks.{layer}.{name}": array for name, array in arrays.items()}
    graph, state = nnx.split(model)
    paths = [path for path, _ in nnx.to_flat_state(state)]

    def experts(x_TD, ids_TK, weights_TK, experts_ER):
        layout, activation = RecordLayout.of(config), config.moe.activation
        given = x_TD, ids_TK, weights_TK, experts_ER, layout
        return run_experts(*given, activation=activation, method="dense")

    @jax.jit
    def run(flat, records):
        leaves = [(p, nnx.Param(flat[".".join(map(str, p))])) for p in paths]
        bound = nnx.merge(graph, nnx.from_flat_state(leaves))
        return bound(tokens_BS, records, experts)[0]

    return np.asarray(run(flat, weights.experts))


def test_multipliers_and_a_bias_of_the_head_do_what_weights_would(weights):
    scaled = dataclasses.replace(GQA, embed_scale=2.0, logit_divisor=4.0)
    embed_VD = 2 * weights.top["embed"]
    want = logits(GQA, weights, embed=embed_VD) / 4
    np.testing.assert_array_equal(logits(scaled, weights), want)
    bias_V = np.linspace(-1, 1, GQA.vocab_size, dtype=np.float32)
    biased = dataclasses.replace(GQA, head_bias=True)
    found = logits(biased, weights, head_bias=bias_V)
    np.testing.assert_array_equal(found, logits(GQA, weights) + bias_V)


def numpy_norm(block, name, x, kind):
    scale_D = np.asarray(getattr(block, name)[...])
    bias_D = 0.0
    if kind == "layer":
        x = x - x.mean(-1, keepdims=True)
        bias_D = np.asarray(getattr(block, f"{name}_bias")[...])
    size = np.sqrt((x**2).mean(-1, keepdims=True) + GQA.norm_eps)
    return x / size * scale_D + bias_D


@pytest.mark.parametrize(
    "before, after, kind, is_moe",
    [
        (False, True, "rms", True),
        (True, True, "rms", False),
        (True, False, "layer", True),
    ],
)
def test_branches_are_normed_where_the_config_says(before, after, kind, is_moe):
    config = dataclasses.replace(
        GQA, norm_before=before, norm_after=after, norm=kind, residual_scale=0.5
    )
    rng = np.random.default_rng(0)
    block = Block(config, int(is_moe), nnx.Rngs(0))  # layer 0 is dense
    for path, leaf in nnx.to_flat_state(nnx.state(block, nnx.Param)):
        if "norm" in path[-1]:
            assert (leaf[...] == float(path[-1].endswith("norm"))).all()
            drawn = (1 + rng.normal(size=leaf.shape)).astype(np.float32)
            getattr(block, path[-1])[...] = jax.numpy.asarray(drawn)
    x_BSD = rng.normal(size=(1, 4, GQA.d_model)).astype(np.float32)
    y_TD = rng.normal(size=(4, GQA.d_model)).astype(np.float32)
    graph, state = nnx.split(block)

    @jax.jit
    def run(state, taken_BSD):
        """The layer by its methods, and its attention and its experts alone."""
        block, window = nnx.merge(graph, state), jax.numpy.int32(9)
        valid_BS = jax.numpy.ones((1, 4), bool)
        chunk = make_chunk(config, jax.numpy.zeros(1, jax.numpy.int32), valid_BS)
        attended, _ = block.attend(x_BSD, chunk, window)
        y, _ = block.attn(taken_BSD, chunk.tables[0], chunk.start_B, window)
        if not is_moe:
            own = block.mlp(attended.normed_BSD), block.add_mlp(*attended)
            return attended, y, *own
        _, routing = block.route(attended.normed_BSD, chunk)
        shared = block.run_shared(attended.normed_BSD[0], routing)
        all_TD = y_TD + jax.nn.sigmoid(shared.logit_T1) * shared.mlp_TD
        own = all_TD, add_experts(config, attended.x_BSD, y_TD, shared)
        return attended, y, *own

    def taken(branch, x):
        return numpy_norm(block, f"{branch}_norm", x, kind) if before else x

    def given(branch, y):
        name = f"{branch}_after_norm"
        return 0.5 * (numpy_norm(block, name, y, kind) if after else y)

    (found_BSD, normed_BSD), *rest = run(state, taken("attn", x_BSD))
    attended_BSD, own, end_BSD = map(np.asarray, rest)
    want_BSD = x_BSD + given("attn", attended_BSD)
    np.testing.assert_allclose(found_BSD, want_BSD, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(normed_BSD, taken("mlp", want_BSD), rtol=1e-4, atol=1e-4)
    want_BSD = want_BSD + given("mlp", own)
    np.testing.assert_allclose(end_BSD, want_BSD, rtol=1e-5, atol=1e-5)

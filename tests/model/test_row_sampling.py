"""Rows with rules of their own draw as `sampling` says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from moe_edge.model import row_sampling, sampling
from moe_edge.model.row_sampling import Rules, draw_rows, log_probs, make_rules
from moe_edge.model.sampling import Sampling

V = 131  # no whole number of blocks
draw = jax.jit(draw_rows)


ROWS = 64  # of most tests: one shape


def logits_of(rows: int, seed=0) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal((rows, V), np.float32)
    return np.round(4 * drawn) / 2  # ties


@functools.partial(jax.jit, static_argnums=(1, 2))
def kept_by_sorting(logits_V, top_k, top_p):
    return jnp.isfinite(sampling.keep_likely(logits_V[None], top_k, top_p)[0])


@jax.jit
def kept_by_halving(logits_V, top_k, top_p):
    logits_1V = logits_V[None]
    mass_1V = jnp.exp(logits_1V - logits_1V.max())
    return row_sampling.keep_likely(logits_1V, mass_1V, top_k, top_p)[0] > 0


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(1, 1.0), (500, 1.0), (0, 0.99), (40, 0.6)]
)
def test_limits_keep_the_same_tokens_as_by_sorting(top_k, top_p):
    for logits_V in logits_of(4):
        limits = np.int32(top_k), np.float32(top_p)
        np.testing.assert_array_equal(
            kept_by_halving(logits_V, *limits), kept_by_sorting(logits_V, top_k, top_p)
        )


def test_greedy_rows_beside_drawing_ones_take_the_first_likeliest():
    logits_BV = logits_of(ROWS)
    rules = [(Sampling(), 0), (Sampling(temperature=2.0), 0)] * (ROWS // 2)
    tokens_B, after = draw(logits_BV, make_rules(rules))
    tokens_B = np.asarray(tokens_B)
    np.testing.assert_array_equal(tokens_B[::2], logits_BV.argmax(-1)[::2])
    np.testing.assert_array_equal(after.step_B, np.ones(ROWS))


def test_frequencies_match_the_tempered_distribution():
    rule, draws = Sampling(temperature=0.5, top_k=3, seed=2**40 + 1), 4000
    logits_V = logits_of(1)[0]
    rules = make_rules([(rule, step) for step in range(draws)])
    got, _ = draw(np.tile(logits_V, (draws, 1)), rules)
    expected = np.where(kept_by_sorting(logits_V, 3, 1.0), np.exp(2 * logits_V), 0.0)
    expected /= expected.sum()
    frequencies = np.bincount(np.asarray(got), minlength=V) / draws
    np.testing.assert_allclose(frequencies, expected, atol=0.03)


def test_draw_never_takes_a_token_without_mass():
    logits_BV = np.full((ROWS, V), -np.inf, np.float32)
    logits_BV[:, 70], logits_BV[:, 3] = 0.0, -1.0
    rules = [(Sampling(temperature=1.0, seed=seed), 0) for seed in range(ROWS)]
    assert set(np.asarray(draw(logits_BV, make_rules(rules))[0]).tolist()) == {3, 70}


def test_seed_and_step_decide_a_draw():
    logits_BV = np.zeros((ROWS, V), np.float32)
    rules = [
        (Sampling(temperature=1.0, seed=s), n)
        for s, n in ((1, 5), (1, 5), (2**32 + 1, 5), (1, 6)) * (ROWS // 4)
    ]
    drawn = draw(logits_BV, make_rules(rules))[0].tolist()
    same, again, other_seed, other_step = drawn[:4]
    assert same == again and len({same, other_seed, other_step}) == 3
    earlier = make_rules([(Sampling(temperature=1.0, seed=1), 4)] * ROWS)
    assert draw(logits_BV, earlier)[1].step_B.tolist() == [5] * ROWS
    assert isinstance(earlier, Rules)


def test_log_probs_of_a_token_are_among_the_likeliest_exactly():
    logits_BV = logits_of(3)
    tokens_B = logits_BV.argmax(-1).astype(np.int32)
    own_B, values_BN, ids_BN = jax.jit(log_probs, static_argnums=2)(
        logits_BV, tokens_B, 5
    )
    np.testing.assert_array_equal(np.asarray(ids_BN)[:, 0], tokens_B)
    np.testing.assert_array_equal(np.asarray(values_BN)[:, 0], own_B)
    expected_BV = scipy.special.log_softmax(logits_BV, axis=-1)
    np.testing.assert_allclose(own_B, expected_BV.max(-1), rtol=1e-6)

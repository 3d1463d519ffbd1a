import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.model.sampling import Sampling, keep_likely, likeliest, sample

PROBS = np.array([[0.05, 0.4, 0.25, 0.1, 0.2]], np.float32)
LOGITS = jnp.asarray(np.log(PROBS))


def kept(**kwargs) -> list[int]:
    options = {"top_k": 0, "top_p": 1.0} | kwargs
    row = np.asarray(keep_likely(LOGITS, **options))[0]
    return np.flatnonzero(np.isfinite(row)).tolist()


def test_top_k_keeps_the_k_likeliest():
    assert kept(top_k=2) == [1, 2]
    assert kept(top_k=99) == [0, 1, 2, 3, 4]


def test_top_p_keeps_the_smallest_nucleus():
    assert kept(top_p=0.39) == [1]
    assert kept(top_p=0.6) == [1, 2]
    assert kept(top_p=0.86) == [1, 2, 3, 4]


def test_top_k_applies_before_top_p():
    # Within the top 2, token 1 has 0.4 / 0.65 = 0.615 of the mass.
    assert kept(top_k=2, top_p=0.61) == [1]
    assert kept(top_k=2, top_p=0.62) == [1, 2]


def test_sample_greedy_ties_go_to_the_lower_id():
    logits = jnp.asarray([[1.0, 3.0, 3.0], [2.0, 2.0, 0.0]])
    got = sample(logits, jax.random.split(jax.random.key(0), 2), Sampling())
    np.testing.assert_array_equal(got, [1, 0])


def test_sample_frequencies_match_tempered_distribution():
    draws = 20_000
    logits = jnp.broadcast_to(LOGITS, (draws, 5))
    keys = jax.random.split(jax.random.key(0), draws)
    got = sample(logits, keys, Sampling(temperature=0.5, top_k=3))
    expected = np.where(PROBS[0] >= 0.2, PROBS[0] ** 2, 0.0)
    expected /= expected.sum()
    frequencies = np.bincount(np.asarray(got), minlength=5) / draws
    np.testing.assert_allclose(frequencies, expected, atol=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature must be .* got -1.0"),
        ({"temperature": float("nan")}, "got nan"),
        ({"top_k": -2}, "top_k must be .* got -2"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, "got 1.5"),
    ],
)
def test_sampling_rejects_bad_options(options, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**options)


def test_likeliest_is_argmax_of_any_values():
    rng = np.random.default_rng(0)
    logits_BV = np.round(rng.normal(size=(9, 40)) * 2).astype(np.float32)
    logits_BV[1], logits_BV[2, ::3], logits_BV[3, 5:] = -np.inf, np.inf, np.nan
    logits_BV[4, 39] = 100
    want_B = np.argmax(logits_BV, axis=-1)  # JAX's passes over NaN on a GPU
    np.testing.assert_array_equal(likeliest(jnp.asarray(logits_BV)), want_B)
    assert likeliest(jnp.asarray(logits_BV[3])) == want_B[3]

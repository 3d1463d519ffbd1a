"""Attention over caches in fewer bytes: as over the values that these bytes hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.kernels import native, native_attention
from moe_edge.model import cache_types, kv_cache
from moe_edge.model.attention_config import CACHE_TYPES
from tests.kernels.test_native_latent import case as latent_case
from tests.kernels.test_native_latent import compiled as latent
from tests.kernels.test_native_step import NO_WINDOW, given_of
from tests.kernels.test_native_step import fused as step
from tests.support.host_kernels import needs_kernels

SHORT = CACHE_TYPES[1:]
WIDTHS = {"bfloat16": (20, 12), "q8_0": (64, 32)}  # of heads of k and v


def stored(kind: str, values) -> jax.Array:
    """Values as a cache of this type holds them."""
    dtype = cache_types.stored(kind, values.shape).dtype
    return jax.jit(cache_types.encode, static_argnums=1)(values, dtype)


@pytest.fixture(params=["portable", "avx2", "avx512"])
def instructions(request):
    if not native.use(request.param):
        pytest.skip(f"no {request.param} here")
    yield request.param
    native.use(None)


@needs_kernels
@pytest.mark.parametrize("kind", SHORT)
def test_attention_has_the_bits_of_the_values_that_are_stored(kind, instructions):
    P, W = WIDTHS[kind]
    rng = np.random.default_rng(1)
    q, k, v = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((2, 3, 4, P), (4, 21, P), (4, 21, W))
    )
    kept = stored(kind, k), stored(kind, v)
    values = [cache_types.decode(each) for each in kept]
    for window in (NO_WINDOW, 5):
        more = np.array([2, 18], np.int32), np.int32(window), 0.2
        got, want = (
            native_attention.attend(q, *kept, *more),
            native_attention.attend(q, *values, *more),
        )
        assert (np.asarray(got) == np.asarray(want)).all()
    assert not np.array_equal(values[0], k)


@needs_kernels
@pytest.mark.parametrize("kind", SHORT)
def test_a_step_stores_the_bytes_of_xla(kind, instructions):
    P, W = WIDTHS[kind]
    products, caches, _, start_B, _, options = given_of(
        3, 4, 2, P, W, 0, False, False, False, False
    )
    products[1][0, 0, :32] = 0.0  # a block of zeros
    kept = [stored(kind, each) for each in caches]
    given = products, kept, None, start_B, None, np.int32(NO_WINDOW)
    y, *written = step(*given, tuple(options.items()), 0.3)
    for new, cache, got in zip(products[1:], kept, written, strict=True):
        want = jax.jit(kv_cache.write)(cache, new.reshape(-1, 1, new.shape[2]), start_B)
        assert (np.asarray(got) == np.asarray(want[0])).all()
    more = start_B, np.int32(NO_WINDOW), 0.3
    again = native_attention.attend(products[0][:, None], *written, *more)
    assert (np.asarray(again)[:, 0] == np.asarray(y)).all()


@needs_kernels
@pytest.mark.parametrize("kind", SHORT)
def test_latents_have_the_bits_of_the_values_that_are_stored(kind, instructions):
    # Values are 40 of the 64 columns: no whole blocks, and no whole vectors.
    q, low, cache, norm, weights, tables, start_B = latent_case(3, 5, 12, 24, 40, 7, 20)
    run = latent(7, False)
    rest = norm, weights, tables, start_B, np.int32(NO_WINDOW)
    kept = stored(kind, cache)
    y, written = run(q, low, kept, *rest)
    values = cache_types.decode(written)
    # The token's own row is rounded too: written again, it is what it was.
    _, exact = run(q, low, cache_types.decode(kept), *rest)
    assert (np.asarray(stored(kind, exact)) == np.asarray(written)).all()
    assert not np.array_equal(values, exact)
    last = (
        cache_types.decode(kept)
        .at[np.arange(3), start_B]
        .set(values[np.arange(3), start_B])
    )
    assert (np.asarray(last) == np.asarray(values)).all()
    queries = attended(q, values, weights, tables, start_B)
    np.testing.assert_allclose(y, queries, rtol=0, atol=2e-5)


def attended(q, values, weights, tables, start_B):
    """What heads attend to over latents `[B, M, R + rope]`, in float64."""
    B, H, _ = q.shape
    cos, sin = (np.asarray(table, np.float64)[:, 0] for table in tables)
    up = np.asarray(jax.lax.bitcast_convert_type(weights, jnp.bfloat16), np.float64)
    up = up.reshape(H, -1, 40)
    y = np.zeros((B, H, 7))
    for b, h in np.ndindex(B, H):
        seen = np.asarray(values[b, : start_B[b] + 1], np.float64)
        first, second = np.split(q[b, h, 12:].astype(np.float64), 2)
        own = [first * cos[b] - second * sin[b], second * cos[b] + first * sin[b]]
        keys, out = np.split(seen[:, :40] @ up[h].T, [12], axis=1)
        scores = keys @ q[b, h, :12] + seen[:, 40:] @ np.concatenate(own)
        share = np.exp(0.05 * (scores - scores.max()))
        y[b, h] = share @ out / share.sum()
    return y


@pytest.mark.parametrize(
    "kind, bound", [("bfloat16", 2**-8), ("q8_0", 0.5 / 127 + 1e-3)]
)
def test_values_come_back_as_near_as_their_type_allows(kind, bound):
    values = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    values[0, :2] = 1e-20, -3e4
    found = cache_types.decode(stored(kind, values))
    blocks = np.abs(values).reshape(5, 2, 32).max(-1).repeat(32, -1)
    scale = np.abs(values) if kind == "bfloat16" else blocks
    assert (np.abs(found - values) <= bound * scale).all()
    # What was rounded once stays what it is.
    assert (np.asarray(cache_types.decode(stored(kind, found))) == found).all()


def test_what_is_no_number_stays_none():
    values = np.ones((3, 32), np.float32)
    values[0, 3], values[1, 5] = np.nan, np.inf
    for kind in SHORT:
        found = np.asarray(cache_types.decode(stored(kind, values)))
        assert not np.isfinite(found[:2]).all(axis=1).any()
        assert np.isfinite(found[2]).all()
    assert np.isnan(found[0]).any()


def test_bfloat16_is_rounded_as_jax_rounds_it():
    values = np.random.default_rng(0).normal(size=4096).astype(np.float32)
    values[:3] = 1.00390625, 1.01171875, -np.inf  # ties, to even
    want = np.asarray(jnp.asarray(values).astype(jnp.bfloat16)).view(np.uint16)
    assert (np.asarray(stored("bfloat16", values)) == want).all()


@needs_kernels
def test_caches_of_two_types_are_refused():
    q = np.zeros((1, 1, 1, 32), np.float32)
    k, v = np.zeros((4, 32), np.float32), np.zeros((4, 32), np.uint16)
    with pytest.raises(Exception, match="k .R, M, P. and v .R, M, W.*of one type"):
        native_attention.attend(q, k, v, np.zeros(1, np.int32), np.int32(9), 1.0)
    odd = np.zeros((4, 50), np.uint8)
    with pytest.raises(Exception, match="or uint8 .q8_0"):
        native_attention.attend(q, odd, odd, np.zeros(1, np.int32), np.int32(9), 1.0)

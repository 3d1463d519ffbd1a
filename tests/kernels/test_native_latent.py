"""The kernel of latent attention against float64, whatever the company and threads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.core.float32 import to_float32
from moe_edge.kernels import native, native_attention
from tests.support.host_kernels import needs_kernels

NO_WINDOW, EPS = 1 << 30, 1e-5
# B, H, nope, rope, R, value, M; widths that are no whole vectors, too.
SHAPES = [
    (1, 3, 16, 8, 40, 24, 30),
    (6, 5, 12, 4, 256, 7, 20),
    (2, 12, 9, 16, 144, 16, 9),
]


def case(B, H, nope, rope, R, value, M, dtype="uint16", seed=0):
    """What `native_attention.step_latent` takes, up to the start."""
    rng = np.random.default_rng(seed)
    shapes = (B, H, nope + rope), (B, R + rope), (B, M, R + rope), (R,)
    given = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    weights = rng.normal(size=(H * (nope + value), R)).astype(np.float32)
    if dtype != "float32":
        weights = np.asarray(jnp.asarray(weights, jnp.bfloat16))
        weights = weights.view(np.uint16) if dtype == "uint16" else weights
    angles = rng.uniform(0, 6, (B, 1, rope // 2))
    tables = tuple(turn(angles).astype(np.float32) for turn in (np.cos, np.sin))
    start_B = rng.integers(0, M, B).astype(np.int32)
    start_B[-1] = M - 1
    return *given, weights, tables, start_B


def turned(x, tables, interleaved):
    cos, sin = (table[:, 0].astype(np.float64) for table in tables)
    one, other = (x[:, 0::2], x[:, 1::2]) if interleaved else np.split(x, 2, axis=1)
    new = one * cos - other * sin, other * cos + one * sin
    return np.stack(new, 2).reshape(x.shape) if interleaved else np.concatenate(new, 1)


def exact(q, low, cache, norm, weights, tables, start_B, window, interleaved):
    """One head after another, keys and values expanded, in float64; and the cache."""
    (B, H, _), R = q.shape, len(norm)
    rope = low.shape[1] - R
    nope = q.shape[2] - rope
    latent = (
        low[:, :R]
        / np.sqrt((low[:, :R].astype(np.float64) ** 2).mean(1) + EPS)[:, None]
    )
    new = np.concatenate([latent * norm, turned(low[:, R:], tables, interleaved)], 1)
    cache = cache.astype(np.float64)
    cache[np.arange(B), np.minimum(start_B, cache.shape[1] - 1)] = new
    up = np.asarray(to_float32(jnp.asarray(weights)), np.float64).reshape(H, -1, R)
    y = np.zeros((B, H, up.shape[1] - nope))
    for b, h in np.ndindex(B, H):
        seen = cache[b, max(0, start_B[b] + 1 - window) : start_B[b] + 1]
        keys, values = np.split(seen[:, :R] @ up[h].T, [nope], axis=1)
        own = turned(
            q[b : b + 1, h, nope:], [t[b : b + 1] for t in tables], interleaved
        )
        scores = keys @ q[b, h, :nope] + seen[:, R:] @ own[0]
        share = np.exp(0.05 * (scores - scores.max()))
        y[b, h] = share @ values / share.sum()
    return y, cache


@functools.cache
def compiled(value: int, interleaved: bool):
    given = {"eps": EPS, "interleaved": interleaved, "value": value, "scale": 0.05}
    return jax.jit(functools.partial(native_attention.step_latent, **given))


def run(q, low, cache, norm, weights, tables, start_B, window=NO_WINDOW, pairs=False):
    value = weights.shape[0] // q.shape[1] - (q.shape[2] - low.shape[1] + len(norm))
    given = q, low, cache, norm, weights, tables, start_B, np.int32(window)
    return [np.asarray(each) for each in compiled(value, pairs)(*given)]


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_latent_attention_is_what_the_formula_says(shape, dtype):
    given = case(*shape, dtype)
    for window, pairs in ((NO_WINDOW, False), (5, True)):
        want = exact(*given, window, pairs)
        assert native.use("portable")
        for name in native.INSTRUCTIONS:
            if native.use(name):
                for got, wanted in zip(run(*given, window, pairs), want, strict=True):
                    atol = 1e-5 * wanted.std() + 1e-6
                    np.testing.assert_allclose(got, wanted, rtol=0, atol=atol)
    native.use(None)


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_bits_depend_on_neither_company_nor_capacity_nor_threads(shape):
    q, low, cache, norm, weights, tables, start_B = case(*shape)
    given = q, low, cache, norm, weights, tables, start_B
    want, written = run(*given)
    for threads in (1, 2, 5):
        native.resize(threads)
        assert (run(*given)[0] == want).all()
    native.resize(0)
    more = np.pad(cache, ((0, 0), (0, 9), (0, 0)), "edge")
    for b in range(shape[0]):
        row, own = slice(b, b + 1), [table[b : b + 1] for table in tables]
        alone = q[row], low[row], more[b], norm, weights, own, start_B[row]
        got, one = run(*alone)
        assert (got == want[row]).all()
        assert (one[: shape[-1]] == written[b]).all() and (
            one[shape[-1] :] == more[b, shape[-1] :]
        ).all()
    cache[0, start_B[0] :] = np.nan  # not seen, or written anew
    assert (run(*given)[0] == want).all()


@needs_kernels
@pytest.mark.parametrize(
    "changes, word",
    [
        ({1: lambda low: low[:, 1:]}, "do not fit"),
        ({2: lambda cache: cache[:, :, 1:]}, "do not fit"),
        ({2: lambda cache: cache[0]}, "do not fit"),
        ({3: lambda norm: norm[1:]}, "do not fit"),
        ({4: lambda weights: weights.view(np.int16)}, "unknown type"),
        ({4: lambda weights: weights[0]}, "expected q"),
        ({5: lambda tables: [t[:, :, 1:] for t in tables]}, "all of the shared key"),
        ({5: lambda tables: (tables[0], tables[1][:2])}, "no angles"),
        ({6: lambda start: start[:1]}, "do not fit"),
        ({6: lambda start: start - 100}, "below position 0"),
    ],
)
def test_refuses_shapes_that_do_not_fit(changes, word):
    given = [*case(*SHAPES[1])]
    for place, change in changes.items():
        given[place] = change(given[place])
    options = {"scale": 1.0, "eps": EPS, "interleaved": False, "value": 7}
    call = jax.jit(functools.partial(native_attention.step_latent, **options))
    with pytest.raises(Exception, match=word):
        jax.block_until_ready(call(*given, np.int32(4)))

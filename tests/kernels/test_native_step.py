"""A step's attention in one call: the bits of the calls apart, in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.kernels import native, native_attention
from moe_edge.model import kv_cache
from moe_edge.model.attention_config import RopeConfig
from moe_edge.model.matvec import compiler_options
from moe_edge.model.rope import rope_tables, rotate
from tests.support.host_kernels import needs_kernels

EPS, NO_WINDOW = 1e-6, 1 << 30
# B, H, G, P, W, rotated, pairs, norms, sinks, chunked
CASES = [
    (1, 3, 1, 64, 64, 64, False, True, False, False),
    (3, 6, 2, 32, 32, 16, True, False, True, False),
    (2, 4, 4, 20, 12, 20, False, True, False, True),
    (4, 8, 2, 16, 16, 0, False, True, True, False),
]


def given_of(B, H, G, P, W, rotated, pairs, normed, sunk, chunked, M=40, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    products = draw(B, H, P), draw(B, G, P), draw(B, G, W)
    caches = [
        draw(B * G, M, width)[slice(None) if B * G > 1 else 0] for width in (P, W)
    ]
    norms = (draw(P), draw(P)) if normed else None
    start_B = rng.integers(0, M, B).astype(np.int32)
    start_B[-1] = M - 1
    rope = RopeConfig(dim=rotated, interleaved=pairs) if rotated else None
    options = {"sinks_H": draw(H)} if sunk else {}
    options |= {"chunked": chunked, "eps": EPS, "interleaved": pairs}
    return products, caches, norms, start_B, rope, options


@functools.partial(
    jax.jit, static_argnums=(4, 6, 7), compiler_options=compiler_options()
)
def fused(products, caches, norms, start_B, rope, window, statics, scale, sinks_H=None):
    tables = None if rope is None else rope_tables(rope, start_B[:, None])
    given = products, caches, norms, tables, start_B, window, scale
    return native_attention.step(*given, **dict(statics), sinks_H=sinks_H)


@functools.partial(
    jax.jit, static_argnums=(4, 6, 7), compiler_options=compiler_options()
)
def apart(products, caches, norms, start_B, rope, window, statics, scale, sinks_H=None):
    options = dict(statics)
    tables = None if rope is None else rope_tables(rope, start_B[:, None])
    q, k, v = (each[:, None] for each in products)
    turned = []
    for y, weight in zip((q, k), norms or (None, None), strict=True):
        if weight is not None:
            flat = native.norm(y.reshape(-1, y.shape[-1]), weight, options["eps"])
            y = flat.reshape(y.shape)
        if rope is not None:
            y = rotate(y, tables, rope.interleaved)
        turned.append(y)
    q, k = turned
    rows = (y.transpose(0, 2, 1, 3).reshape(-1, 1, y.shape[-1]) for y in (k, v))
    k, v = (
        kv_cache.write(cache, new, start_B)[0]
        for cache, new in zip(caches, rows, strict=True)
    )
    more = {"chunked": options["chunked"], "sinks_H": sinks_H}
    return native_attention.attend(q, k, v, start_B, window, scale, **more)[:, 0], k, v


@needs_kernels
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_the_calls_apart(case):
    *given, options = given_of(*case)
    sinks_H = options.pop("sinks_H", None)
    statics = tuple(options.items())
    for window in (NO_WINDOW, 7):
        for rests in (False, True):
            if rests:  # a row that rests stands beyond the cache
                given[3] = given[3].copy()
                given[3][0] = 40
            args = *given, np.int32(window), statics, 0.3, sinks_H
            for got, want in zip(fused(*args), apart(*args), strict=True):
                assert (np.asarray(got) == np.asarray(want)).all()


@needs_kernels
def test_bits_depend_on_neither_company_nor_threads():
    products, caches, norms, start_B, rope, options = given_of(*CASES[1])
    sinks_H = options.pop("sinks_H")
    more = np.int32(NO_WINDOW), tuple(options.items()), 0.3, sinks_H
    want = fused(products, caches, norms, start_B, rope, *more)
    for threads in (1, 2, 5):
        native.resize(threads)
        got = fused(products, caches, norms, start_B, rope, *more)
        assert all(
            (np.asarray(a) == np.asarray(b)).all()
            for a, b in zip(got, want, strict=True)
        )
    native.resize(0)
    for b in range(3):
        row, heads = slice(b, b + 1), slice(2 * b, 2 * b + 2)
        alone = [each[row] for each in products], [each[heads] for each in caches]
        got = fused(*alone, norms, start_B[row], rope, *more)
        assert (np.asarray(got[0]) == np.asarray(want[0])[row]).all()


@needs_kernels
def test_caches_that_are_donated_are_not_copied():
    products, caches, norms, start_B, rope, options = given_of(*CASES[0])
    statics = tuple(options.items())

    def run(caches, products, start_B):
        given = products, caches, norms, start_B, rope, NO_WINDOW, statics, 0.3
        return fused.__wrapped__(*given)

    program = jax.jit(run, donate_argnums=0)
    caches = [jnp.array(each) for each in caches]
    text = program.lower(caches, products, start_B).compile().as_text()
    assert " copy(" not in text


@needs_kernels
@pytest.mark.parametrize(
    "change, word",
    [
        (lambda p, c, n, s: ([p[0][0], *p[1:]], c, n, s), "expected q"),
        (lambda p, c, n, s: ([p[0], p[1][:, :, 1:], p[2]], c, n, s), "do not fit"),
        (lambda p, c, n, s: (p, [c[0], c[1][:, 1:]], n, s), "expected caches"),
        (lambda p, c, n, s: (p, [each[:5] for each in c], n, s), "caches, start or"),
        (lambda p, c, n, s: (p, c, [each[1:] for each in n], s), "do not fit"),
        (lambda p, c, n, s: (p, c, n, s - 100), "below position 0"),
    ],
)
def test_refuses_shapes_that_do_not_fit(change, word):
    products, caches, norms, start_B, _, options = given_of(*CASES[2])
    call = jax.jit(
        functools.partial(native_attention.step, scale=1.0, window=4, **options)
    )
    products, caches, norms, start_B = change(products, caches, norms, start_B)
    tables = [np.zeros((2, 1, 10), np.float32)] * 2
    with pytest.raises(Exception, match=word):
        jax.block_until_ready(call(products, caches, norms, tables, start_B))

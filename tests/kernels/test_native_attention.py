"""The attention kernel against float64, whatever the company, capacity and threads."""

import functools

import jax
import numpy as np
import pytest

from moe_edge.kernels import native, native_attention
from tests.support.host_kernels import needs_kernels

NO_WINDOW = 1 << 30


def case(B, S, G, Q, P, M, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(B, S, G * Q, P))
    k, v = rng.normal(size=(2, B * G, M, P))
    start_B = rng.integers(0, M - S + 1, B).astype(np.int32)
    start_B[0], start_B[-1] = 0, M - S
    return *(each.astype(np.float32) for each in (q, k, v)), start_B


def exact(q, k, v, start_B, window, scale, sinks_H=None, chunked=False):
    """One token after another, in float64."""
    B, S, H, P = q.shape
    G = k.shape[0] // B
    shape = B, G, k.shape[1], -1
    k, v = (each.reshape(shape).astype(np.float64) for each in (k, v))
    y = np.zeros((B, S, H, v.shape[-1]))
    for b, s, h in np.ndindex(B, S, H):
        end = start_B[b] + s + 1
        first = (end - 1) // window * window if chunked else max(0, end - window)
        seen = slice(first, end)
        scores = k[b, h * G // H, seen] @ (q[b, s, h] * scale).astype(np.float64)
        extra = [] if sinks_H is None else [sinks_H[h]]
        weights = np.exp(scores - max([*scores, *extra]))
        total = weights.sum() + sum(np.exp(e - max([*scores, *extra])) for e in extra)
        y[b, s, h] = weights / total @ v[b, h * G // H, seen]
    return y


@functools.cache
def compiled(scale: float, chunked: bool):
    return jax.jit(
        functools.partial(native_attention.attend, scale=scale, chunked=chunked)
    )


def run(q, k, v, start_B, window, scale, sinks_H=None, chunked=False):
    args = (q, k, v, start_B, np.int32(window))
    return np.asarray(compiled(scale, chunked)(*args, sinks_H=sinks_H))


SHAPES = [
    (1, 1, 1, 1, 16, 5),
    (3, 1, 2, 3, 32, 70),
    (2, 5, 1, 9, 64, 33),
    (1, 20, 2, 2, 128, 40),
    (2, 3, 2, 4, 80, 50),
    (2, 4, 1, 5, 12, 30),
    (1, 2, 3, 1, 20, 17),
]


@needs_kernels
@pytest.mark.parametrize("window", [NO_WINDOW, 18, 1])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_what_the_formula_says(shape, has_sinks, window):
    given = case(*shape)
    heads = given[0].shape[2]
    sinks_H = np.linspace(-2, 3, heads).astype(np.float32) if has_sinks else None
    want = exact(*given, window, 0.3, sinks_H)
    assert native.use("portable")
    for name in native.INSTRUCTIONS:
        if native.use(name):
            got = run(*given, window, 0.3, sinks_H)
            np.testing.assert_allclose(got, want, rtol=0, atol=3e-6)


@needs_kernels
@pytest.mark.parametrize("shape", [(3, 6, 2, 3, 32, 70), (2, 3, 2, 4, 12, 40)])
@pytest.mark.parametrize("width", [8, 20, 48])
def test_values_of_another_width_and_chunks(shape, width):
    """Queries on both sides of a border of chunks, and the bits of single steps."""
    q, k, v, start_B = case(*shape)
    v = np.random.default_rng(1).normal(size=(*v.shape[:2], width)).astype(np.float32)
    start_B[0] = 3
    for chunked in (False, True):
        want = exact(q, k, v, start_B, 5, 0.3, chunked=chunked)
        for name in native.INSTRUCTIONS:
            if not native.use(name):
                continue
            got = run(q, k, v, start_B, 5, 0.3, chunked=chunked)
            np.testing.assert_allclose(got, want, rtol=0, atol=3e-6)
            for s in range(shape[1]):
                one = q[:, s : s + 1], k, v, start_B + np.int32(s), 5, 0.3
                assert (run(*one, chunked=chunked) == got[:, s : s + 1]).all()


@needs_kernels
def test_bits_depend_on_neither_company_nor_capacity_nor_threads():
    q, k, v, start_B = case(4, 3, 2, 3, 32, 64)
    start_B[-1] = 40
    want = run(q, k, v, start_B, NO_WINDOW, 0.2)
    for threads in (1, 2, 5):
        native.resize(threads)
        assert (run(q, k, v, start_B, NO_WINDOW, 0.2) == want).all()
    more_k, more_v = (np.pad(a, ((0, 0), (0, 40), (0, 0)), "edge") for a in (k, v))
    assert (run(q, more_k, more_v, start_B, NO_WINDOW, 0.2) == want).all()
    for b in range(4):
        row, heads = slice(b, b + 1), slice(2 * b, 2 * b + 2)
        alone = run(q[row], k[heads], v[heads], start_B[row], NO_WINDOW, 0.2)
        assert (alone == want[row]).all()
    alone = run(q[:1], k[0], v[0], start_B[:1], NO_WINDOW, 0.2)
    assert (alone == run(q[:1], k[:1], v[:1], start_B[:1], NO_WINDOW, 0.2)).all()


@needs_kernels
@pytest.mark.parametrize("window", [NO_WINDOW, 18, 1])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 7, 2, 1, 32, 40)])
def test_what_a_chunk_computes_is_what_steps_compute(shape, has_sinks, window):
    """Whoever shares its pass, a token has the same bits."""
    q, k, v, start_B = case(*shape)
    sinks_H = np.linspace(-2, 3, q.shape[2]).astype(np.float32) if has_sinks else None
    begins = start_B, np.full_like(start_B, min(13, shape[5] - shape[1]))
    for name in native.INSTRUCTIONS:
        if not native.use(name):
            continue
        for start_B in begins:
            whole = run(q, k, v, start_B, window, 0.2, sinks_H)
            steps = [
                run(q[:, s : s + 1], k, v, start_B + np.int32(s), window, 0.2, sinks_H)
                for s in range(shape[1])
            ]
            assert (np.concatenate(steps, axis=1) == whole).all()


@needs_kernels
def test_high_and_low_scores_stay_finite():
    q, k, v, start_B = case(1, 1, 1, 2, 32, 20)
    for factor in (0.0, 1e4):
        got = run(q, k * np.float32(factor), v, start_B + 0, NO_WINDOW, 1.0)
        want = exact(q, k * np.float32(factor), v, start_B, NO_WINDOW, 1.0)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@needs_kernels
def test_what_a_row_does_not_see_is_not_read():
    q, k, v, start_B = case(3, 2, 2, 3, 32, 40)
    start_B = np.array([0, 11, 37], np.int32)
    want = exact(q, k, v, start_B, NO_WINDOW, 0.2)
    for b, start in enumerate(start_B):
        for cache in (k, v):
            cache[2 * b : 2 * b + 2, start + 2 :] = np.nan
    got = run(q, k, v, start_B, NO_WINDOW, 0.2)
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6)
    # Nor by the token before, which shares a pass over the keys with it.
    for cache in (k, v):
        before, cache[0, 1] = cache[0, 1].copy(), np.nan
        got = run(q, k, v, start_B, NO_WINDOW, 0.2)
        np.testing.assert_allclose(got[0, 0], want[0, 0], rtol=0, atol=3e-6)
        assert np.isnan(got[0, 1, :3]).all()
        cache[0, 1] = before
    # One that it does see is seen by nobody else.
    k[2, 3] = np.nan
    assert np.isnan(run(q, k, v, start_B, NO_WINDOW, 0.2)[1, :, :3]).all()
    got = run(q, k, v, start_B, NO_WINDOW, 0.2)
    want[1, :, :3] = np.nan
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6)


@needs_kernels
def test_what_a_window_has_left_behind_is_not_read():
    q, k, v, _ = case(1, 4, 1, 3, 32, 40)
    start_B = np.array([9], np.int32)
    want = exact(q, k, v, start_B, 2, 0.2)
    for cache in (k, v):
        before, cache[0, 8] = cache[0, 8].copy(), np.nan  # the first token's alone
        got = run(q, k, v, start_B, 2, 0.2)
        assert np.isnan(got[0, 0]).all()
        np.testing.assert_allclose(got[0, 1:], want[0, 1:], rtol=0, atol=3e-6)
        cache[0, 8] = before


@needs_kernels
def test_a_row_that_rests_in_a_full_session_stays_within_it():
    """It attends from the position behind the last one; others have their bits."""
    q, k, v, start_B = case(2, 1, 1, 2, 32, 24)
    start_B = np.array([7, 24], np.int32)
    alone = run(q[:1], k[:1], v[:1], start_B[:1], NO_WINDOW, 0.2)
    for window in (NO_WINDOW, 0, -3):
        got = run(q, k, v, start_B, window, 0.2)
        assert np.isfinite(got).all()
        if window == NO_WINDOW:
            assert (got[:1] == alone).all()
            last = exact(q[1:], k[1:], v[1:], np.array([23]), NO_WINDOW, 0.2)
            np.testing.assert_allclose(got[1:], last, rtol=0, atol=3e-6)


@needs_kernels
def test_keys_that_count_for_nothing_count_for_exactly_nothing():
    """A product of a tiny weight would be rounded differently from thread to thread."""
    q, k, v, start_B = case(1, 1, 1, 1, 32, 20)
    k[0, :, :] = -q[0, 0, 0] * 100
    k[0, 5] = q[0, 0, 0] * 100
    v[0, :, :], v[0, 5] = 1e30, 0.0
    got = run(q, k, v, np.array([19], np.int32), NO_WINDOW, 1.0)
    assert (got == 0.0).all()


@needs_kernels
@pytest.mark.parametrize(
    "change, word",
    [
        (lambda q, k, v, s: (q[:, :, :, :4], k, v, s), "do not fit"),
        (lambda q, k, v, s: (q[:, :, :3], k, v, s), "do not fit"),
        (lambda q, k, v, s: (q, k, v[:2], s), "expected caches k .R, M, P."),
        (lambda q, k, v, s: (q, k, v, s[:1]), "do not fit"),
        (lambda q, k, v, s: (q, k, v, s - 1), "below position 0"),
        (lambda q, k, v, s: (q, k[0], v[0], s), "do not fit"),
    ],
)
def test_refuses_shapes_that_do_not_fit(change, word):
    with pytest.raises(Exception, match=word):
        run(*change(*case(2, 1, 2, 2, 16, 8)), NO_WINDOW, 1.0)


@needs_kernels
@pytest.mark.parametrize("window", [NO_WINDOW, 18])
def test_a_start_beyond_the_cache_reads_no_further(window):
    """Positions of rows that rest go on: their values count for nothing."""
    q, k, v, _ = case(2, 1, 2, 3, 32, 40)
    full = run(q, k, v, np.full(2, 40, np.int32), window, 0.2)
    for start in (41, 1 << 20, 2**31 - 1):
        got = run(q, k, v, np.full(2, start, np.int32), window, 0.2)
        assert (got == full).all()

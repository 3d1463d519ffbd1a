"""A step of decoding by one kernel, interpreted, against float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.kernels import decode_attention, rows
from moe_edge.model.attention import NO_WINDOW
from moe_edge.model.config import AttentionConfig, RopeConfig

EPS = 1e-5
PLAIN = AttentionConfig(
    num_heads=6, num_kv_heads=2, head_dim=8, rope=RopeConfig(dim=8), softmax_scale=0.4
)
KINDS = {
    "plain": PLAIN,
    "multi_head": dataclasses.replace(PLAIN, num_heads=3, num_kv_heads=3),
    "one_kv_head": dataclasses.replace(PLAIN, num_heads=5, num_kv_heads=1),
    "odd_width": dataclasses.replace(PLAIN, head_dim=12, rope=RopeConfig(dim=12)),
    "turned_in_part": dataclasses.replace(PLAIN, rope=RopeConfig(dim=4)),
    "interleaved": dataclasses.replace(PLAIN, rope=RopeConfig(dim=8, interleaved=True)),
    "interleaved_in_part": dataclasses.replace(
        PLAIN, head_dim=12, rope=RopeConfig(dim=6, interleaved=True)
    ),
    "full_norm": dataclasses.replace(PLAIN, qk_norm="full", clip_qkv=0.9),
    "head_norm": dataclasses.replace(
        PLAIN, qk_norm="head", qkv_bias=True, clip_qkv=0.9
    ),
    "head_norm_after_rope": dataclasses.replace(
        PLAIN,
        head_dim=12,
        rope=RopeConfig(dim=6),
        qk_norm="head",
        qk_norm_after_rope=True,
    ),
    "sinks": dataclasses.replace(PLAIN, sinks=True, qkv_bias=True),
}
KINDS["full_norm_bias"] = dataclasses.replace(KINDS["full_norm"], qkv_bias=True)


@pytest.mark.parametrize(
    "unknown",
    [
        {"rope": None},
        {"chunked": True},
        {"v_head_dim": 6},
        {"value_scale": 0.5},
        {"v_norm": True},
        {"k_is_v": True},
        {"qk_norm": "unit"},
        {"temperature": 0.1},
    ],
)
def test_what_the_kernel_does_not_compute_goes_another_way(unknown):
    assert all(map(decode_attention.knows, KINDS.values()))
    assert not decode_attention.knows(dataclasses.replace(PLAIN, **unknown))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Blocks of a few positions, spans of several blocks."""
    monkeypatch.setattr(decode_attention, "SPAN", 32)
    monkeypatch.setattr(decode_attention, "VALUES", 4)
    monkeypatch.setattr(decode_attention, "WARPS", 2)


def case(attention, start_B, capacity, seed=0):
    """Arguments of `attend`, without window, attention and eps."""
    B, G, P = len(start_B), attention.num_kv_heads, attention.head_dim
    widths = {"q": attention.num_heads * P, "k": G * P, "v": G * P}
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape).astype(np.float32))

    products = {name: draw(B, 1, width) for name, width in widths.items()}
    vectors = {}
    if attention.qkv_bias:
        vectors |= {f"{name}_bias": draw(width) for name, width in widths.items()}
    if attention.qk_norm == "head":
        vectors |= {"q_norm": draw(P), "k_norm": draw(P)}
    if attention.qk_norm == "full":
        vectors |= {f"{name}_norm": draw(widths[name]) for name in "qk"}
    if attention.sinks:
        vectors["sinks"] = draw(attention.num_heads)
    shape = (capacity, P) if B * G == 1 else (B * G, capacity, P)
    cache = {"k": draw(*shape), "v": draw(*shape)}
    tables = draw(B, 1, attention.rope.dim // 2), draw(B, 1, attention.rope.dim // 2)
    return products, vectors, cache, tables, jnp.asarray(start_B, jnp.int32)


@functools.cache
def compiled(attention):
    return jax.jit(
        lambda given, window: decode_attention.attend(*given, window, attention, EPS)
    )


def run(given, attention, window=NO_WINDOW):
    """(y, cache), as NumPy."""
    return jax.tree.map(np.asarray, compiled(attention)(given, jnp.int32(window)))


def exact(given, attention, window=NO_WINDOW):
    """The same in float64, one head after another."""
    given = jax.tree.map(lambda each: np.asarray(each, np.float64), given)
    products, vectors, cache, tables, start_B = given
    H, G, P = attention.num_heads, attention.num_kv_heads, attention.head_dim
    rope, clip = attention.rope, attention.clip_qkv
    first = np.arange(rope.dim // 2)
    second = first + rope.dim // 2
    if rope.interleaved:
        first, second = 2 * first, 2 * first + 1

    def norm(y, weight):
        return y / np.sqrt((y**2).mean() + EPS) * weight

    def heads_of(name, b):
        y = products[name][b, 0] + vectors.get(f"{name}_bias", 0.0)
        weight = vectors.get(f"{name}_norm")
        if weight is not None and attention.qk_norm == "full":
            y = norm(y, weight)
        y = y if clip is None else y.clip(-clip, clip)
        y = y.reshape(-1, P)
        by_head = weight is not None and attention.qk_norm == "head"
        if by_head and not attention.qk_norm_after_rope:
            y = np.stack([norm(head, weight) for head in y])
        if name == "v":
            return y
        cos, sin = tables[0][b, 0], tables[1][b, 0]
        a, b = y[:, first], y[:, second]
        turned = y.copy()
        turned[:, first], turned[:, second] = a * cos - b * sin, b * cos + a * sin
        if by_head and attention.qk_norm_after_rope:
            turned = np.stack([norm(head, weight) for head in turned])
        return turned

    caches = {
        name: each.reshape(len(start_B), G, -1, P).copy()
        for name, each in cache.items()
    }
    out = np.zeros((len(start_B), H, P))
    for b, start in enumerate(start_B.astype(int)):
        start = min(start, caches["k"].shape[2] - 1)
        q = heads_of("q", b)
        for name in "kv":
            caches[name][b, :, start] = heads_of(name, b)
        seen = slice(max(0, start + 1 - window), start + 1)
        for h in range(H):
            k, v = (caches[name][b, h * G // H, seen] for name in "kv")
            scores = k @ q[h] * attention.scale
            extra = vectors["sinks"][h : h + 1] if attention.sinks else []
            top = max([*scores, *extra])
            weights = np.exp(scores - top)
            total = weights.sum() + np.exp(extra - top).sum()
            out[b, h] = weights @ v / total
    cache = {name: each.reshape(cache[name].shape) for name, each in caches.items()}
    return out.reshape(len(start_B), -1), cache


def assert_exact(found, want):
    np.testing.assert_allclose(found[0], want[0], rtol=0, atol=1e-5)
    for name in "kv":
        np.testing.assert_allclose(found[1][name], want[1][name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_step_is_what_the_formula_says(name):
    capacity = 70 if name in ("plain", "head_norm", "one_kv_head") else 32
    given = case(KINDS[name], [0, 31, 17, 16, capacity - 2], capacity)
    assert_exact(run(given, KINDS[name]), exact(given, KINDS[name]))


@pytest.mark.parametrize("capacity", [32, 400])
def test_window_hides_what_lies_before_it(capacity):
    start_B = [0, 3, 16, 17, 31, capacity - 1, capacity // 2]
    given = case(KINDS["sinks"], start_B, capacity)
    for window in (1, 5, 17, 33, 40):
        found = run(given, KINDS["sinks"], window)
        assert_exact(found, exact(given, KINDS["sinks"], window))


def test_one_row_of_one_head_keeps_the_caches_shape():
    attention = KINDS["one_kv_head"]
    given = case(attention, [20], 70)
    found = run(given, attention)
    assert found[1]["k"].shape == (70, 8)
    assert_exact(found, exact(given, attention))


@pytest.mark.parametrize("name", ["full_norm_bias", "head_norm", "sinks"])
def test_bits_depend_on_neither_company_nor_capacity(name):
    attention, starts = KINDS[name], [0, 30, 31, 12]
    given = case(attention, starts, 32)
    want, cache = run(given, attention, 20)
    products, vectors, caches, tables, start_B = given
    for capacity in (48, 400):  # beyond a span
        more = jax.tree.map(
            lambda each, by=capacity: jnp.pad(each, ((0, 0), (0, by - 32), (0, 0))),
            caches,
        )
        got, _ = run((products, vectors, more, tables, start_B), attention, 20)
        np.testing.assert_array_equal(got, want)
    G = attention.num_kv_heads
    for b in range(len(starts)):
        row, heads = slice(b, b + 1), slice(G * b, G * b + G)
        own = jax.tree.map(lambda each, at=row: each[at], (products, tables, start_B))
        own_cache = {name: each[heads] for name, each in caches.items()}
        alone = own[0], vectors, own_cache, *own[1:]
        got, got_cache = run(alone, attention, 20)
        np.testing.assert_array_equal(got, want[row])
        np.testing.assert_array_equal(got_cache["k"], cache["k"][heads])


def test_what_a_row_does_not_see_is_not_read():
    attention, starts, window = KINDS["sinks"], [0, 11, 50], 20
    given = case(attention, starts, 70)
    want = exact(given, attention, window)[0]
    for name, array in given[2].items():
        array = np.array(array)
        for b, start in enumerate(starts):
            array[2 * b : 2 * b + 2, start:] = np.nan
            array[2 * b : 2 * b + 2, : max(0, start + 1 - window)] = np.nan
        given[2][name] = jnp.asarray(array)
    found = run(given, attention, window)[0]
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5)
    # One that it does see is seen by nobody else.
    given[2]["k"] = given[2]["k"].at[2, 3].set(np.nan)
    found = run(given, attention, window)[0].reshape(3, 6, 8)
    assert np.isnan(found[1, :3]).all() and np.isfinite(found[[0, 2]]).all()
    assert np.isfinite(found[1, 3:]).all()


@pytest.mark.parametrize("capacity", [32, 70])
def test_a_row_that_rests_in_a_full_session_stays_within_it(capacity):
    given = case(PLAIN, [7, capacity + 3], capacity)
    for window in (NO_WINDOW, 0, -3):
        found = run(given, PLAIN, window)
        assert np.isfinite(found[0]).all()
        if window == NO_WINDOW:
            assert_exact(found, exact(given, PLAIN))


@pytest.mark.parametrize("factor", [0.0, 1e3])
def test_high_and_low_scores_stay_finite(factor):
    products, *rest = case(PLAIN, [40, 3], 70)
    given = products | {"q": products["q"] * factor}, *rest
    found, want = run(given, PLAIN), exact(given, PLAIN)
    np.testing.assert_allclose(found[0], want[0], rtol=0, atol=1e-3)


def test_is_used_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(rows, "are_wanted", lambda: True)
    assert not decode_attention.suits(1, 1)
    monkeypatch.setenv("MOE_EDGE_DECODE_ATTENTION", "1")
    assert decode_attention.suits(1, 1) and decode_attention.suits(16, 1)
    assert not decode_attention.suits(17, 1) and not decode_attention.suits(1, 2)
    monkeypatch.setattr(rows, "are_wanted", lambda: False)
    assert not decode_attention.suits(1, 1)


def test_refuses_another_value(monkeypatch):
    monkeypatch.setenv("MOE_EDGE_DECODE_ATTENTION", "yes")
    with pytest.raises(ConfigError, match="MOE_EDGE_DECODE_ATTENTION.*yes"):
        decode_attention.suits(1, 1)

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_edge.engine.programs import jit_step
from moe_edge.model import kv_cache
from moe_edge.model.attention import NO_WINDOW, Attention, masked_softmax
from moe_edge.model.config import RopeConfig
from moe_edge.model.mla import LatentAttention
from moe_edge.model.transformer import make_chunk
from tests.support.tiny_models import GPT_OSS, GQA, MLA

S = 11
ONE_HEAD = dataclasses.replace(
    GQA, attention=dataclasses.replace(GQA.attention, num_kv_heads=1)
)
KINDS = [(Attention, GQA), (Attention, ONE_HEAD), (LatentAttention, MLA)]


chunk_of = jax.jit(make_chunk, static_argnums=0)


def inputs(config, batch=2):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, S, config.d_model)).astype(np.float32)
    start = np.zeros(batch, np.int32)
    return x, chunk_of(config, start, np.ones((batch, S), bool))


@functools.cache
def make(kind, config):
    """A module with random weights of a size that makes attention uneven."""
    module = nnx.eval_shape(lambda: kind(config, 0, nnx.Rngs(0)))
    rng = np.random.default_rng(1)
    state = nnx.state(module, nnx.Param)
    flat = [
        (
            path,
            nnx.Param(jnp.asarray(0.5 * rng.standard_normal(leaf.shape), jnp.float32)),
        )
        for path, leaf in nnx.to_flat_state(state)
    ]
    nnx.update(module, nnx.from_flat_state(flat))
    return module


def rotate_numpy(
    x, position, theta=10_000.0, interleaved=False, dim=None, turning=None
):
    """The first `dim` of one vector, pair by pair: all, or the first `turning`."""
    dim = dim or len(x)
    out, half = x.copy(), dim // 2
    for i in range(half if turning is None else turning):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        angle = position * theta ** (-2 * i / dim)
        out[a] = x[a] * np.cos(angle) - x[b] * np.sin(angle)
        out[b] = x[b] * np.cos(angle) + x[a] * np.sin(angle)
    return out


@functools.cache
def attend_of(kind, config):
    """Jitted once for all tests of a module."""
    return jax.jit(make(kind, config).__call__)


def parts(**changes):
    attention = dataclasses.replace(GQA.attention, **{"qk_norm": "head", **changes})
    return dataclasses.replace(GQA, attention=attention)


PARTS = {
    "gqa": GQA,
    "gpt_oss": GPT_OSS,
    "rotated_in_part": parts(rope=RopeConfig(dim=6)),
    "interleaved": parts(rope=RopeConfig(dim=8, interleaved=True)),
    "norm_after_rope": parts(
        rope=RopeConfig(dim=4, interleaved=True), qk_norm_after_rope=True
    ),
    "no_rope": parts(rope=None),
    "value_width": parts(v_head_dim=10, sinks=True, value_scale=0.7),
    "chunked": parts(chunked=True),
    "k_is_v": parts(k_is_v=True, v_norm=True, softmax_scale=1.0),
    "proportional": parts(rope=RopeConfig(dim=8, kind="proportional", turning=3)),
    "unit_norm": parts(qk_norm="unit", qk_norm_after_rope=True),
    "temperature": parts(rope=None, temperature=0.4, temperature_span=3),
}


@pytest.mark.parametrize(
    ("name", "window"),
    [
        *((name, NO_WINDOW) for name in PARTS),
        ("gqa", 4),
        ("value_width", 4),
        ("chunked", 4),
    ],
)
def test_attention_matches_numpy_loop(name, window):
    config = PARTS[name]
    module, a = make(Attention, config), config.attention
    x, chunk = inputs(config)
    attend = attend_of(Attention, config)
    tables = chunk.tables[0] if chunk.tables else None
    got, _ = attend(x, tables, chunk.start_B, jnp.int32(window))
    w = {
        k[0]: np.asarray(v[...], np.float64)
        for k, v in nnx.to_flat_state(nnx.state(module))
    }
    rows = np.asarray(x[0], np.float64)
    heads, groups, P = a.num_heads, a.num_kv_heads, a.head_dim
    q = (rows @ w["q"].T + w["q_bias"]).reshape(S, heads, P)
    k = (rows @ w["k"].T + w["k_bias"]).reshape(S, groups, P)
    own = "k" if a.k_is_v else "v"
    v = (rows @ w[own].T + w[f"{own}_bias"]).reshape(S, groups, -1)
    if a.v_norm:
        v = v / np.sqrt((v**2).mean(-1, keepdims=True) + config.norm_eps)
    v = v * a.value_scale

    def turned(x, position, weight):
        rope, normed = a.rope, a.qk_norm != "none"

        def norm(y):
            return y / np.sqrt((y**2).mean() + config.norm_eps) * w.get(weight, 1.0)

        x = norm(x) if normed and not a.qk_norm_after_rope else x
        if rope is not None:
            turning = rope.turning or rope.dim // 2
            form = {"interleaved": rope.interleaved, "dim": rope.dim}
            x = rotate_numpy(x, position, **form, turning=turning)
        return norm(x) if normed and a.qk_norm_after_rope else x

    out = np.zeros((S, heads, a.value_dim))
    for s in range(S):
        first = s // window * window if a.chunked else max(0, s - window + 1)
        for h in range(heads):
            g = h // (heads // groups)
            query = turned(q[s, h], s, "q_norm")
            query *= 1 + a.temperature * np.log1p((s + 1) // a.temperature_span)
            keys = [turned(k[j, g], j, "k_norm") for j in range(first, s + 1)]
            scores = [query @ key * a.scale for key in keys]
            if a.sinks:
                scores.append(w["sinks"][h])
            weights = np.exp(scores - np.max(scores))
            weights = (weights / weights.sum())[: s + 1 - first]
            out[s, h] = weights @ v[first : s + 1, g]
    expected = out.reshape(S, -1) @ w["o"].T + (w["o_bias"] if a.out_bias else 0.0)
    np.testing.assert_allclose(got[0], expected, rtol=1e-4, atol=1e-4)


def test_latent_attention_matches_expanded_numpy():
    """The paper's form: keys and values expanded per head, nothing absorbed."""
    module, a = make(LatentAttention, MLA), MLA.attention
    x, chunk = inputs(MLA)
    attend = attend_of(LatentAttention, MLA)
    got, _ = attend(x, chunk.tables[0], chunk.start_B, jnp.int32(NO_WINDOW))
    w = {
        k[0]: np.asarray(v[...], np.float64)
        for k, v in nnx.to_flat_state(nnx.state(module))
    }
    rows = np.asarray(x[0], np.float64)

    def norm(y, weight):
        return y / np.sqrt((y**2).mean(-1, keepdims=True) + MLA.norm_eps) * weight

    q = norm(rows @ w["q_a"].T, w["q_a_norm"]) @ w["q_b"].T
    q = q.reshape(S, a.num_heads, a.head_dim)
    low = rows @ w["kv_a"].T
    latent, k_rope = (
        norm(low[:, : a.kv_lora_rank], w["kv_a_norm"]),
        low[:, a.kv_lora_rank :],
    )
    kv = (latent @ w["kv_b"].T).reshape(S, a.num_heads, a.nope_dim + a.v_head_dim)
    out = np.zeros((S, a.num_heads, a.v_head_dim))
    for s in range(S):
        for h in range(a.num_heads):
            turned = rotate_numpy(q[s, h, a.nope_dim :], s, interleaved=True)
            scores = np.array(
                [
                    q[s, h, : a.nope_dim] @ kv[j, h, : a.nope_dim]
                    + turned @ rotate_numpy(k_rope[j], j, interleaved=True)
                    for j in range(s + 1)
                ]
            ) / np.sqrt(a.head_dim)
            weights = np.exp(scores - scores.max())
            out[s, h] = weights / weights.sum() @ kv[: s + 1, h, a.nope_dim :]
    expected = out.reshape(S, -1) @ w["o"].T
    np.testing.assert_allclose(got[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "config", "batch"),
    [(*kind, 1) for kind in KINDS] + [(Attention, GQA, 2), (LatentAttention, MLA, 2)],
)
def test_cache_of_unequal_starts_matches_no_cache(kind, config, batch):
    window, attend = jnp.int32(NO_WINDOW), attend_of(kind, config)
    x, chunk = inputs(config)
    whole, _ = attend(x, chunk.tables[0], chunk.start_B, window)
    x, chunk = inputs(config, batch)  # the first rows of the same
    cache = kv_cache.empty_cache(config.attention, batch, 16)
    _, cache = attend(x, chunk.tables[0], chunk.start_B, window, cache)
    # Row 0 repeats its token 4, row 1 its token 9: each at its own position.
    start = np.array([4, 9][:batch], np.int32)
    one = chunk_of(config, start, np.ones((batch, 1), bool))
    picked = np.stack([x[row, at : at + 1] for row, at in enumerate(start)])
    got, _ = attend(picked, one.tables[0], start, window, cache)
    for row, at in enumerate(start):
        np.testing.assert_allclose(got[row, 0], whole[row, at], rtol=1e-5, atol=1e-5)


def large_results(step, x, start, cache, least: int) -> list[str]:
    """Instructions of the compiled step that write `least` numbers or more."""
    program = jit_step(step, donate_argnums=2).lower(x, start, cache).compile()
    entry = program.as_text().split("ENTRY ")[1]
    found = re.findall(r"%(\S+) = f32\[([\d,]+)\]\S* ([\w-]+)\(", entry)
    assert found
    return [
        name
        for name, shape, kind in found
        if math.prod(map(int, shape.split(","))) >= least
        and kind not in ("parameter", "bitcast")
        # In place: a write, or what a host kernel wrote to.
        and "dynamic-update-slice" not in name
        and kind != "get-tuple-element"
    ]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads XLA:CPU's program")
@pytest.mark.parametrize(("kind", "config"), KINDS)
def test_decoding_copies_no_cache(kind, config):
    module, capacity = make(kind, config), 512
    cache = kv_cache.empty_cache(config.attention, 1, capacity)

    def step(x, start, cache):
        chunk = make_chunk(config, start, jnp.ones((1, 1), bool))
        return module(x, chunk.tables[0], start, jnp.int32(NO_WINDOW), cache)

    def reshaping(x, start, cache):
        flat = {name: array[0] for name, array in cache.items()}
        y, flat = step(x, start, flat)
        return y, {name: array[None] for name, array in flat.items()}

    parts = [array.size for array in cache.values()]
    if kind is LatentAttention:  # neither the latents alone nor the keys
        a = config.attention
        parts = [capacity * a.kv_lora_rank, capacity * a.rope.dim]
    case = jnp.zeros((1, 1, config.d_model)), jnp.asarray([9], jnp.int32)
    assert not large_results(step, *case, cache, min(parts))
    reshaped = {name: array[None] for name, array in cache.items()}
    assert large_results(reshaping, *case, reshaped, min(parts))


def test_masked_softmax_fully_masked_row_is_finite():
    got = masked_softmax(jnp.ones((1, 4)), jnp.zeros((1, 4), bool))
    assert np.isfinite(np.asarray(got)).all()


def test_sinks_take_mass():
    mask = jnp.ones((1, 3), bool)
    got = masked_softmax(jnp.zeros((1, 3)), mask, jnp.zeros((1, 1)))
    np.testing.assert_allclose(got, 0.25, rtol=1e-6)

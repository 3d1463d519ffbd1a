import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.engine.programs import jit_step
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.slots import RowSlots
from moe_edge.kernels import native
from moe_edge.model import cached_attention, kv_cache
from moe_edge.model.attention import NO_WINDOW
from tests.model.test_attention import KINDS, large_results, make
from tests.support.layered import StoreReader
from tests.support.running import SIZES, log_probs_of, row, run
from tests.support.slow_cases import slow
from tests.support.tiny_models import MIXED, MLA, random_prompts, random_weights

B, H, P, W, S = 3, 2, 6, 5, 4
FAR = 2048
STARTS = np.array([1, 700, 1530], np.int32)


@functools.cache
def attend(chunked: bool):
    taken = functools.partial(cached_attention.attend, tokens=S, chunked=chunked)
    return jax.jit(taken)


@functools.cache
def arrays(capacity=FAR):
    """Queries, of which two share a head of the cache, keys, values and sinks."""
    rng = np.random.default_rng(0)
    shapes = (B * H, 2 * S, P), (B * H, FAR, P), (B * H, FAR, W), (B * H, 2 * S, 1)
    q, k, v, sinks = (2 * rng.standard_normal(each, np.float32) for each in shapes)
    return q, k[:, :capacity], v[:, :capacity], sinks


def expected(start_B, window, chunked, sinks_RQ1):
    q, k, v, _ = (array.astype(np.float64) for array in arrays())
    scores = (q @ k.transpose(0, 2, 1)).reshape(B, H, 2, S, FAR)
    seen = kv_cache.visible(start_B, S, FAR, window, chunked)[:, None, None]
    weights = np.where(seen, np.exp(scores), 0.0).reshape(B * H, 2 * S, FAR)
    total = weights.sum(-1, keepdims=True)
    return weights @ v / (total if sinks_RQ1 is None else total + np.exp(sinks_RQ1))


@pytest.mark.parametrize(
    ("window", "chunked", "with_sinks"),
    [
        (NO_WINDOW, False, True),
        (9, False, False),
        (600, False, True),
        (600, True, False),
    ],
)
def test_blocks_attend_to_what_is_visible(window, chunked, with_sinks):
    *given, sinks = arrays()
    sinks = sinks if with_sinks else None
    got = attend(chunked)(*given, STARTS, window, sinks_RQ1=sinks)
    want = expected(STARTS, window, chunked, sinks)
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_bits_depend_on_neither_capacity_nor_company():
    got = np.asarray(attend(False)(*arrays()[:3], STARTS, NO_WINDOW))
    near = np.asarray(attend(False)(*arrays(1536)[:3], STARTS, NO_WINDOW))
    np.testing.assert_array_equal(near, got)
    others = STARTS.copy()
    others[1:] = 3, 5 * FAR  # the last one rests beyond the cache
    there = np.asarray(attend(False)(*arrays()[:3], others, NO_WINDOW))
    np.testing.assert_array_equal(there[:H], got[:H])
    assert np.isfinite(there).all()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads XLA:CPU's program")
@pytest.mark.parametrize(("kind", "config"), KINDS)
def test_decoding_over_blocks_copies_no_cache(kind, config, monkeypatch):
    monkeypatch.setattr(native, "choice", lambda: "xla")
    module, capacity = make(kind, config), 1536
    cache = kv_cache.empty_cache(config.attention, 1, capacity)

    def step(x, start, cache):
        return module(x, tables, start, jnp.int32(NO_WINDOW), cache)

    dim = config.attention.rope.dim
    tables = jnp.ones((1, 1, dim // 2)), jnp.zeros((1, 1, dim // 2))
    case = jnp.zeros((1, 1, config.d_model)), jnp.asarray([9], jnp.int32)
    assert not large_results(step, *case, cache, capacity * dim)
    text = jit_step(step).lower(*case, cache).as_text()
    assert "stablehlo.while" in text


def test_unknown_choice_is_refused(monkeypatch):
    monkeypatch.setenv("MOE_EDGE_FILLED_ATTENTION", "yes")
    with pytest.raises(ConfigError, match="MOE_EDGE_FILLED_ATTENTION.*yes"):
        cached_attention.suits(4096)
    monkeypatch.setenv("MOE_EDGE_FILLED_ATTENTION", "0")
    assert not cached_attention.suits(4096)
    monkeypatch.setenv("MOE_EDGE_FILLED_ATTENTION", "1")
    found = [cached_attention.suits(M) for M in (1024, 1536, 3 << 14)]
    assert found == [False, True, True]


@pytest.mark.parametrize("config", slow(MIXED, MLA))
def test_engines_have_the_same_bits_and_a_length_compiles_nothing(config, monkeypatch):
    """Blocks of 16 positions, so that tiny sessions have several."""
    monkeypatch.setattr(native, "choice", lambda: "xla")
    monkeypatch.setattr(cached_attention, "BLOCK", 16)
    whole = forced(ResidentEngine(random_weights(config)))
    monkeypatch.setattr(cached_attention, "SHORT", 32)
    resident = ResidentEngine(random_weights(config))
    want = forced(resident)
    np.testing.assert_allclose(want, whole, atol=1e-5 * whole.std())
    for mode in ("layered", "fused"):
        options = OffloadOptions(mode=mode, device_memory="50%")
        with make_offloaded(StoreReader(config), options) as engine:
            np.testing.assert_array_equal(forced(engine), want)
            if (config, mode) == (MLA, "layered"):
                for got, expected in zip(served(engine), served(resident), strict=True):
                    np.testing.assert_array_equal(got, expected)


def served(engine) -> list[np.ndarray]:
    """Log probabilities of rows that join at unequal lengths."""
    rows = row("a", 9, 12, top_logprobs=2), row("b", 30, 6, top_logprobs=2)
    slots = RowSlots(engine, **SIZES, deterministic=True)
    return [*log_probs_of(run(slots, zip((0, 2), rows, strict=True))).values()]


def forced(engine):
    """Prefill of 14 tokens, then steps across two edges of blocks."""
    session = engine.new_session(1, 64)
    (tokens,) = random_prompts(engine.config, [36])
    out, counts = [engine.prefill(session, [tokens[:14]])], set()
    for token in tokens[14:]:
        token_B = jax.device_put(np.array([token], np.int32))
        out.append(engine.decode(session, token_B, jax.device_put(np.ones(1, bool))))
        counts.add(engine.programs.num_compiled())
    assert len(counts) == 1
    return np.concatenate(jax.device_get(out))

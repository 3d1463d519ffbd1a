"""Gated delta-net: a matrix a head that forgets, and learns what it gets wrong.

For a key k, a value v, a decay e^g and a rate beta a step is S <- e^g S;
S <- S + beta k (v - S^T k)^T; the output is S^T q. Prefill computes sub-chunks of
`state_config.ANCHOR` positions at once: within one, values corrected for each other are
a triangular system, and S advances once. (Yang et al., arXiv 2412.06464)
"""

import jax
import jax.numpy as jnp
from flax import nnx

from moe_edge.core.float32 import to_float32
from moe_edge.kernels import delta_state, native, native_attention
from moe_edge.model.config import ModelConfig
from moe_edge.model.layers import add_params, rms_norm
from moe_edge.model.matvec import einsum, linear, linear_each
from moe_edge.model.short_conv import begun, causal_conv
from moe_edge.model.state_config import ANCHOR

_BLOCK = 16  # rows of a triangular system that are solved one after another


def step(q_BHK, k_BHK, v_BHV, g_BH, beta_BH, state_BHKV):
    """A position of each row.

    Args:
      q_BHK: float32, of each head, scaled; so are all others.
      g_BH: logarithm of the decay; 0, and beta 0, leave the state as it is.
    Returns:
      (output `[B, H, V]`, state).
    """
    state_BHKV = state_BHKV * jnp.exp(g_BH)[..., None, None]
    known_BHV = jnp.sum(state_BHKV * k_BHK[..., None], axis=2)
    change_BHV = beta_BH[..., None] * (v_BHV - known_BHV)
    state_BHKV = state_BHKV + k_BHK[..., None] * change_BHV[:, :, None]
    return jnp.sum(state_BHKV * q_BHK[..., None], axis=2), state_BHKV


def _by_kernel(kernel, q_BHK, k_BHK, v_BHV, g_BH, beta_BH, state):
    """`step` by a kernel, which reads a state once and writes it where it lies.

    Args:
      kernel: of heads, as `native_attention.delta`.
      state: as the cache has it.
    """
    parts = q_BHK, k_BHK, v_BHV, g_BH, beta_BH
    y, state = kernel(*(each.reshape(-1, *each.shape[2:]) for each in parts), state)
    return y.reshape(v_BHV.shape), state


def chunked(q_BSHK, k_BSHK, v_BSHV, g_BSH, beta_BSH, state_BHKV, advance=None):
    """Positions of each row, S of them, the first at a multiple of `ANCHOR`.

    Args: as of `step`, and
      advance: a kernel that takes a state through all sub-chunks; None: XLA.
    Returns:
      (output `[B, S, H, V]`, state).
    """
    S, C = q_BSHK.shape[1], ANCHOR
    given = q_BSHK, k_BSHK, v_BSHV, g_BSH[..., None], beta_BSH[..., None]
    # N sub-chunks, first: [N, B, H, C, width].
    q, k, v, g, beta = (_cut(each, -(-S // C)) for each in given)
    # Decay from position j to i: the sum behind j, and no difference of two sums from
    # the beginning, which would lose its last digits.
    seen_CC = jnp.tri(C, dtype=jnp.float32)
    behind = g * jnp.tri(C, k=-1, dtype=jnp.float32).reshape(1, 1, 1, C, C)
    sums = einsum("im,nbhmj->nbhij", seen_CC, behind)
    decay = jnp.exp(sums) * seen_CC.reshape(1, 1, 1, C, C)
    total = jnp.cumsum(g[..., 0], axis=-1)
    taken = beta * k
    system = einsum("nbhik,nbhjk->nbhij", taken, k) * decay
    grown = jnp.exp(total)[..., None]
    both = jnp.concatenate([beta * v, taken * grown], axis=-1)
    both = einsum("nbhij,nbhjw->nbhiw", _inverse(system), both)
    values, keys = jnp.split(both, [v.shape[-1]], axis=-1)
    weights = einsum("nbhik,nbhjk->nbhij", q, k) * decay
    left = k * decay[..., -1, :, None]

    def advance_one(state, chunk):
        values, keys, weights, queries, left, forgets = chunk
        values = values - einsum("bhik,bhkv->bhiv", keys, state)
        y = einsum("bhik,bhkv->bhiv", queries, state)
        y = y + einsum("bhij,bhjv->bhiv", weights, values)
        state = state * forgets[..., None, None]
        return state + einsum("bhik,bhiv->bhkv", left, values), y

    parts = values, keys, weights, q * grown, left, grown[..., -1, 0]
    if advance is None:
        state_BHKV, y = jax.lax.scan(advance_one, state_BHKV, parts)
    else:
        flat = (each.reshape(each.shape[0], -1, *each.shape[3:]) for each in parts)
        y, state = advance(*flat, state_BHKV.reshape(-1, *state_BHKV.shape[2:]))
        y, state_BHKV = y.reshape(v.shape), state.reshape(state_BHKV.shape)
    y_BSHV = y.transpose(1, 0, 3, 2, 4).reshape(q_BSHK.shape[0], -1, *v_BSHV.shape[2:])
    return y_BSHV[:, :S], state_BHKV


def _inverse(system) -> jax.Array:
    """Of triangular matrices `[..., C, C]` whose diagonals are one.

    What is on and above the diagonal is not read. Blocks on the diagonal by forward
    substitution, all at once, then two and two of them: XLA:CPU's solver takes ten
    times as long, and a product of powers loses digits where keys agree.
    """
    batch, C, W = system.shape[:-2], system.shape[-1], _BLOCK
    cuts = [slice(first, first + W) for first in range(0, C, W)]
    blocks = jnp.stack([system[..., cut, cut] for cut in cuts], axis=-3)
    inverses = _inverse_of_block(blocks)
    while len(cuts) > 1:
        upper, lower = inverses[..., 0::2, :, :], inverses[..., 1::2, :, :]
        pairs = zip(cuts[1::2], cuts[0::2], strict=True)
        below = jnp.stack([system[..., i, j] for i, j in pairs], axis=-3)
        below = einsum("...ij,...jk->...ik", lower, below)
        below = einsum("...ij,...jk->...ik", below, upper)
        above = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
        rest = jnp.concatenate([-below, lower], axis=-1)
        inverses = jnp.concatenate([above, rest], axis=-2)
        W *= 2
        cuts = [slice(first, first + W) for first in range(0, C, W)]
    return inverses.reshape(*batch, C, C)


def _inverse_of_block(blocks) -> jax.Array:
    """`[..., W, W]`: a row that is known leaves those below, one after another."""
    W = blocks.shape[-1]
    # Rows first, then all matrices side by side: [W (row), W (column), matrices].
    matrices = blocks.reshape(-1, W, W).transpose(1, 2, 0)
    below = matrices * jnp.tri(W, k=-1, dtype=jnp.float32)[..., None]
    units = jnp.eye(W, dtype=jnp.float32)[..., None]

    def subtract(row, found):
        factors = jax.lax.dynamic_index_in_dim(below, row, axis=1)
        return found - factors * jax.lax.dynamic_index_in_dim(found, row)

    start = jnp.broadcast_to(units, below.shape)
    found = jax.lax.fori_loop(0, W - 1, subtract, start)
    return found.transpose(2, 0, 1).reshape(blocks.shape)


def _cut(x_BSHW, chunks: int) -> jax.Array:
    """`[N, B, H, C, W]`: filled up with zeros, which change no state."""
    B, S, H, W = x_BSHW.shape
    x = jnp.pad(x_BSHW, ((0, 0), (0, chunks * ANCHOR - S), (0, 0), (0, 0)))
    return x.reshape(B, chunks, ANCHOR, H, W).transpose(1, 0, 3, 2, 4)


class DeltaNet(nnx.Module):
    """A layer of it: a short convolution of q, k and v before, a gated norm behind."""

    def __init__(self, config: ModelConfig, layer: int, rngs: nnx.Rngs):
        self.config, self.eps = config.attention_of(layer), config.norm_eps
        add_params(self, self.config.weight_shapes(config.d_model), rngs)

    def __call__(self, x_BSD, valid_BS, cache=None):
        """Runs the layer: see `ShortConv`."""
        config = self.config
        B, S, _ = x_BSD.shape
        H, V = config.value_heads, config.value_dim
        qkv_BSC, z, b_BSH, a_BSH = self._products(x_BSD)
        states = begun(config, B, cache)
        given = qkv_BSC, self.conv[...], states["window"], valid_BS
        qkv_BSC, window = causal_conv(*given)
        q, k, v_BSHV = self._heads(jax.nn.silu(qkv_BSC))
        rate_H, bias_H = to_float32(self.a_log[...]), to_float32(self.dt_bias[...])
        rates = jnp.exp(rate_H).reshape(1, 1, H)
        g_BSH = -rates * jax.nn.softplus(a_BSH + bias_H.reshape(1, 1, H))
        is_token_BS1 = valid_BS[..., None]
        g_BSH = jnp.where(is_token_BS1, g_BSH, 0.0)
        beta_BSH = jnp.where(is_token_BS1, jax.nn.sigmoid(b_BSH), 0.0)
        parts = q, k, v_BSHV, g_BSH, beta_BSH
        y, state = self._advance(parts, states["state"], valid_BS, cache is not None)
        y = rms_norm(y, self.norm[...], self.eps) * jax.nn.silu(z.reshape(B, S, H, V))
        y_BSD = linear(y.reshape(B, S, H * V), self.out_proj[...])
        if cache is None:
            return y_BSD, None
        return y_BSD, {"state": state, "window": window}

    def _advance(self, parts, state, valid_BS, by_kernel: bool):
        """Output and states behind all positions.

        Args:
          parts: q, k, v, g and beta.
          state: as the cache has it.
          by_kernel: whether there may be one.
        """
        config, (B, S) = self.config, valid_BS.shape
        on_gpu = by_kernel and delta_state.suits()
        if S == 1 and (on_gpu or (by_kernel and native.suits(0, parts[0]))):
            # It leaves the bits of rows without a token: nothing keeps what was before.
            kernel = delta_state.step if on_gpu else native_attention.delta
            y, state = _by_kernel(kernel, *(each[:, 0] for each in parts), state)
            return y[:, None], state
        before = state.reshape(B, -1, config.key_dim, config.value_dim)
        if S == 1:
            y, after = step(*(each[:, 0] for each in parts), before)
            y = y[:, None]
        else:
            kernel = delta_state.advance if on_gpu else None
            y, after = chunked(*parts, before, kernel)
        # Where a row has no token its state keeps its bits, that of -0.0, too.
        moves_B = jnp.any(valid_BS, axis=1).reshape(B, 1, 1, 1)
        return y, jnp.where(moves_B, after, before).reshape(state.shape)

    def _products(self, x_BSD):
        """[q | k | v], z, b and a of every position."""
        config = self.config
        if not config.grouped:
            names = "in_qkv", "in_z", "in_b", "in_a"
            return linear_each(x_BSD, *(getattr(self, name)[...] for name in names))
        B, S, _ = x_BSD.shape
        G, K = config.key_heads, config.key_dim
        values = config.value_heads // G * config.value_dim
        qkvz, ba = linear_each(x_BSD, self.in_qkvz[...], self.in_ba[...])
        cuts = K, 2 * K, 2 * K + values
        *qkv, z = jnp.split(qkvz.reshape(B, S, G, -1), cuts, axis=-1)
        qkv_BSC = jnp.concatenate([each.reshape(B, S, -1) for each in qkv], axis=-1)
        b, a = jnp.split(ba.reshape(B, S, G, -1), 2, axis=-1)
        return qkv_BSC, *(each.reshape(B, S, -1) for each in (z, b, a))

    def _heads(self, qkv_BSC):
        """q and k of unit length, a head of each for every value head, and v."""
        config = self.config
        G, K, H = config.key_heads, config.key_dim, config.value_heads
        B, S, _ = qkv_BSC.shape
        q, k, v = jnp.split(qkv_BSC, [G * K, 2 * G * K], axis=-1)
        q = _of_length(q.reshape(B, S, G, K), K**-0.5)
        k = _of_length(k.reshape(B, S, G, K), 1.0)
        q, k = (jnp.repeat(each, H // G, axis=2) for each in (q, k))
        return q, k, v.reshape(B, S, H, -1)


def _of_length(x, length: float):
    """x of this length along its last axis, less where it is about 1e-3 itself.

    Through the norm's kernel, whose sums do not depend on how many rows there are.
    """
    width = x.shape[-1]
    scale = jnp.full(width, length * width**-0.5, jnp.float32)
    return rms_norm(x, scale, 1e-6 / width)

"""Grouped-query attention with the options of all supported families.

Biases, RMSNorm on q and k (per head, before or after rotation, or over the whole
projection), rotation of a part of each head in either order of pairs, clipping,
sliding windows and learned sink logits are switched by `AttentionConfig`.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from moe_edge.kernels import decode_attention, gradients, native, native_attention
from moe_edge.model import cached_attention, kv_cache
from moe_edge.model.config import ModelConfig
from moe_edge.model.layers import add_bias, add_params, norm_scale, rms_norm
from moe_edge.model.matvec import einsum, linear, linear_each
from moe_edge.model.rope import rotate
from moe_edge.model.shapes import attention_shapes

NO_WINDOW = 1 << 30
HIDDEN = -1e30  # a finite minus infinity: a fully masked row stays finite


def masked_softmax(scores: jax.Array, mask: jax.Array, sinks=None) -> jax.Array:
    """Softmax over the last axis where `mask`; `sinks` joins the denominator.

    Args:
      scores: float32 `[..., M]`.
      mask: bool, broadcastable to scores by rank-equal shape.
      sinks: float32 `[..., 1]` extra logits, or None.
    """
    if sinks is None:
        return _plain_softmax(scores, mask)
    scores = jnp.where(mask, scores, HIDDEN)
    top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sinks)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sinks - top)
    return weights / total


@jax.custom_vjp
def _plain_softmax(scores, mask):
    scores = jnp.where(mask, scores, HIDDEN)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def _plain_softmax_forward(scores, mask):
    weights = _plain_softmax(scores, mask)
    return weights, weights


def _plain_softmax_backward(weights, d_weights):
    # Two passes over the scores where autodiff needs five: training is 10 % faster
    # with 256 positions and 30 % with 512.
    product = weights * d_weights
    return product - weights * jnp.sum(product, axis=-1, keepdims=True), None


_plain_softmax.defvjp(_plain_softmax_forward, _plain_softmax_backward)


class Attention(nnx.Module):
    """Multi-head or grouped-query attention over a cache or over its own chunk."""

    def __init__(self, config: ModelConfig, layer: int, rngs: nnx.Rngs):
        self.config, self.eps = config.attention_of(layer), config.norm_eps
        self.plus_one = config.norm_plus_one
        add_params(self, attention_shapes(self.config, config.d_model), rngs)

    def _parts(self, y, name: str, heads: int) -> jax.Array:
        """A product as q, k or v up to their heads' norms `[B, S, heads, P]`."""
        attention = self.config
        if attention.qkv_bias:
            product = "k" if attention.k_is_v and name == "v" else name
            y = add_bias(y, getattr(self, f"{product}_bias"))
        B, S, _ = y.shape
        if name != "v" and attention.qk_norm == "full":
            y = rms_norm(y, self._norm_weight(name), self.eps)
        if attention.clip_qkv is not None:
            y = jnp.clip(y, -attention.clip_qkv, attention.clip_qkv)
        y = y.reshape(B, S, heads, -1)
        if name == "v" and attention.v_norm:
            y = rms_norm(y, jnp.ones(y.shape[-1], jnp.float32), self.eps)
        if name == "v" and attention.value_scale != 1.0:
            y = y * attention.value_scale
        return y

    def _turned(self, y, name: str, tables) -> jax.Array:
        """Parts of q or k normed per head and rotated."""
        attention = self.config
        by_head = attention.qk_norm in ("head", "unit")
        if by_head and not attention.qk_norm_after_rope:
            y = self._norm_head(y, name)
        if attention.rope is not None:
            y = rotate(y, tables, attention.rope.interleaved)
        if by_head and attention.qk_norm_after_rope:
            y = self._norm_head(y, name)
        return y

    def _norm_head(self, y, name: str) -> jax.Array:
        return rms_norm(y, self._head_weights(name), self.eps)

    def _head_weights(self, name: str) -> jax.Array:
        if self.config.qk_norm == "head":
            return self._norm_weight(name).astype(jnp.float32)
        return jnp.ones(self.config.head_dim, jnp.float32)

    def _norm_weight(self, name: str) -> jax.Array:
        return norm_scale(getattr(self, f"{name}_norm")[...], self.plus_one)

    def _tempered(self, q_BSHP, start_B) -> jax.Array:
        """Queries by the temperature of their positions, if the layer has one."""
        rate, span = self.config.temperature, self.config.temperature_span
        if not rate:
            return q_BSHP
        places_1S = jnp.arange(1, q_BSHP.shape[1] + 1, dtype=jnp.int32)[None]
        spans_BS = ((start_B[:, None] + places_1S) // span).astype(jnp.float32)
        factor_BS = 1.0 + jnp.float32(rate) * jnp.log1p(spans_BS)
        return q_BSHP * factor_BS[..., None, None]

    def __call__(self, x_BSD, tables, start_B, window, cache=None):
        """Attends causally.

        Args:
          x_BSD: float32, normed input.
          tables: cosines and sines of the chunk's positions (`rope_tables`), None
            without rope.
          start_B: int32, position of the first token of each row.
          window: int32 scalar, see `kv_cache.visible`.
          cache: the layer's cache, or None to attend within the chunk only.
        Returns:
          (float32 `[B, S, D]`, the cache with the chunk written, or None).
        """
        attention = self.config
        B, S, _ = x_BSD.shape
        G = attention.num_kv_heads
        P = attention.head_dim
        names = ("q", "k") if attention.k_is_v else ("q", "k", "v")
        q, k, *v = linear_each(x_BSD, *(getattr(self, name)[...] for name in names))
        v, gate = v[0] if v else k, None
        if attention.output_gate:
            q, gate = self._parted(q)
        fused = cache is not None and decode_attention.suits(B, S)
        if fused and decode_attention.knows(attention):
            products = {"q": q, "k": k, "v": v}
            given = products, self._vectors(), cache, tables, start_B, window
            y, cache = decode_attention.attend(*given, attention, self.eps)
            return self._output(y.reshape(B, S, -1), gate), cache
        H, sinks = attention.num_heads, None
        if attention.sinks:
            sinks = self.sinks[...].astype(jnp.float32)
        if cache is not None and S == 1 and self._has_plain_heads(x_BSD):
            heads = {"q": (q, H), "k": (k, G), "v": (v, G)}
            q, k, v = (self._parts(y, name, n) for name, (y, n) in heads.items())
            norms = None
            if attention.qk_norm in ("head", "unit"):
                norms = self._head_weights("q"), self._head_weights("k")
            interleaved = attention.rope is not None and attention.rope.interleaved
            caches = cache["k"], cache["v"]
            given = [y[:, 0] for y in (q, k, v)], caches, norms, tables, start_B, window
            options = {"eps": self.eps, "interleaved": interleaved, "sinks_H": sinks}
            options["chunked"] = attention.chunked
            y, k, v = native_attention.step(*given, attention.scale, **options)
            return self._output(y.reshape(B, 1, -1), gate), {"k": k, "v": v}
        q = self._turned(self._parts(q, "q", H), "q", tables)
        q = self._tempered(q, start_B)
        k = self._turned(self._parts(k, "k", G), "k", tables)
        v = self._parts(v, "v", G)
        k, v = (y.transpose(0, 2, 1, 3).reshape(B * G, S, -1) for y in (k, v))
        first_query = start_B
        if cache is not None:
            k_cache, k = kv_cache.write(cache["k"], k, start_B)
            v_cache, v = kv_cache.write(cache["v"], v, start_B)
            cache = {"k": k_cache, "v": v_cache}
        else:
            first_query = jnp.zeros_like(start_B)
        chunked = attention.chunked
        if cache is not None and native.suits(0, k):
            # The caches themselves: XLA would copy those of one row to reshape them.
            given = q, k_cache, v_cache, start_B, window, attention.scale
            y = native_attention.attend(*given, sinks, chunked)
            return self._output(y.reshape(B, S, -1), gate), cache
        M = k.shape[1]
        q = q.reshape(B, S, G, -1, P).transpose(0, 2, 3, 1, 4)
        plain = not (attention.sinks or chunked) and attention.value_dim == P
        if cache is None and plain and gradients.suits(P, dtype=q.dtype):
            given = q.reshape(-1, S, P), k, v, jnp.asarray(window), attention.scale
            y = gradients.attend(*given).reshape(q.shape)
            y = y.transpose(0, 3, 1, 2, 4).reshape(B, S, -1)
            return self._output(y, gate), cache
        if sinks is not None:
            sinks = sinks.reshape(1, G, -1, 1, 1)
        if cache is not None and cached_attention.suits(M):
            if sinks is not None:
                sinks = jnp.broadcast_to(sinks, (*q.shape[:-1], 1))
                sinks = sinks.reshape(B * G, -1, 1)
            q = (q * attention.scale).reshape(B * G, -1, P)
            given = q, k_cache, v_cache, start_B, window, S, chunked, sinks
            y = cached_attention.attend(*given)
            y = y.reshape(B, G, -1, S, attention.value_dim)
            y = y.transpose(0, 3, 1, 2, 4).reshape(B, S, -1)
            return self._output(y, gate), cache
        # On XLA:CPU a prefill's products are a fifth faster when kept apart from
        # what follows them; training, without a cache, is left as it is.
        apart = jax.lax.optimization_barrier if cache and S > 1 else lambda y: y
        scores = einsum("RQP,RMP->RQM", (q * attention.scale).reshape(B * G, -1, P), k)
        scores = apart(scores).reshape(B, G, -1, S, M)
        mask = kv_cache.visible(first_query, S, M, window, chunked)[:, None, None]
        weights = masked_softmax(scores, mask, sinks).reshape(B * G, -1, M)
        y = apart(einsum("RQM,RMP->RQP", weights, v))
        y = y.reshape(B, G, -1, S, attention.value_dim)
        y = y.transpose(0, 3, 1, 2, 4).reshape(B, S, -1)
        return self._output(y, gate), cache

    def _has_plain_heads(self, x_BSD) -> bool:
        """Whether the host kernel `step` knows what is computed here."""
        attention = self.config
        odd = attention.qk_norm_after_rope or attention.temperature
        return not odd and native.suits(0, x_BSD)

    def _vectors(self) -> dict[str, jax.Array]:
        """What `decode_attention.attend` takes beside the products."""
        names = decode_attention.VECTORS
        own = {name: getattr(self, name)[...] for name in names if hasattr(self, name)}
        norms = own.keys() & {"q_norm", "k_norm"}
        return own | {name: norm_scale(own[name], self.plus_one) for name in norms}

    def _parted(self, q_BSR) -> list[jax.Array]:
        """q and the gate of what attention gives, `[B, S, H * P]`, by head in files."""
        B, S, _ = q_BSR.shape
        both = jnp.split(q_BSR.reshape(B, S, self.config.num_heads, -1), 2, axis=-1)
        return [each.reshape(B, S, -1) for each in both]

    def _gated(self, y_BSR, gate_BSR) -> jax.Array:
        return y_BSR if gate_BSR is None else y_BSR * jax.nn.sigmoid(gate_BSR)

    def _output(self, y_BSR, gate_BSR=None) -> jax.Array:
        y_BSD = linear(self._gated(y_BSR, gate_BSR), self.o[...])
        return add_bias(y_BSD, self.o_bias if self.config.out_bias else None)

"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Only the compressed latent and the shared rotary key are cached. Keys and values
are never expanded: the up-projections are absorbed into the query and the output,
so that decoding and prefill run the same arithmetic. A step of decoding on a CPU is one
host call (`native_attention.step_latent`).
"""

import jax
import jax.numpy as jnp
from flax import nnx

from moe_edge.core.float32 import to_float32
from moe_edge.kernels import native, native_attention
from moe_edge.model import cached_attention, kv_cache
from moe_edge.model.attention import masked_softmax
from moe_edge.model.config import ModelConfig
from moe_edge.model.layers import add_params, rms_norm
from moe_edge.model.matvec import einsum, linear, linear_each
from moe_edge.model.rope import rotate
from moe_edge.model.shapes import attention_shapes


class LatentAttention(nnx.Module):
    """MLA over a cache of latents, or over its own chunk."""

    def __init__(self, config: ModelConfig, layer: int, rngs: nnx.Rngs):
        attention = self.config = config.attention_of(layer)
        eps = attention.lora_norm_eps
        self.eps = config.norm_eps if eps is None else eps
        add_params(self, attention_shapes(attention, config.d_model), rngs)

    def _first(self) -> jax.Array:
        """What the queries' first product is with."""
        return (self.q if self.config.q_lora_rank is None else self.q_a)[...]

    def _queries(self, q):
        """Of their first product: `[B, S, H, nope + rope]`, not rotated."""
        attention = self.config
        if attention.q_lora_rank is not None:
            low = rms_norm(q, self.q_a_norm[...], self.eps)
            q = linear(low, self.q_b[...])
        return q.reshape(*q.shape[:2], attention.num_heads, attention.head_dim)

    def _latents(self, x_BSD, tables):
        """What is cached: normed latent and rotated shared key `[B, S, R+rope]`."""
        attention = self.config
        low = linear(x_BSD, self.kv_a[...])
        latent, key = jnp.split(low, [attention.kv_lora_rank], axis=-1)
        latent = rms_norm(latent, self.kv_a_norm[...], self.eps)
        key = rotate(key[:, :, None, :], tables, attention.rope.interleaved)
        return jnp.concatenate([latent, key[:, :, 0]], -1)

    def __call__(self, x_BSD, tables, start_B, window, cache=None):
        """As `Attention.__call__`."""
        attention = self.config
        B, S, _ = x_BSD.shape
        rank = attention.kv_lora_rank
        if cache is not None and S == 1 and native.suits(0, self.kv_b[...]):
            return self._step(x_BSD, tables, start_B, window, cache)
        q = self._queries(linear(x_BSD, self._first()))
        q_nope, turned = q[..., : attention.nope_dim], q[..., attention.nope_dim :]
        q_rope = rotate(turned, tables, attention.rope.interleaved)
        latents = self._latents(x_BSD, tables)
        first_query = start_B
        if cache is not None:
            written, latents = kv_cache.write(cache["latent"], latents, start_B)
            cache = {"latent": written}
        else:
            first_query = jnp.zeros_like(start_B)
        kv_b = to_float32(self.kv_b[...]).reshape(attention.num_heads, -1, rank)
        up_key, up_value = kv_b[:, : attention.nope_dim], kv_b[:, attention.nope_dim :]
        q_latent = einsum("BSHP,HPR->BHSR", q_nope, up_key)
        # Whole rows of the cache in both products: a part of them would be copied.
        q = jnp.concatenate([q_latent, q_rope.transpose(0, 2, 1, 3)], -1)
        H, M = attention.num_heads, latents.shape[1]
        q = q.reshape(B, H * S, -1)
        if cache is not None and cached_attention.suits(M):
            given = q * attention.scale, written, written, start_B, window, S
            context = cached_attention.attend(*given)
        else:
            scores = einsum("BQR,BMR->BQM", q, latents)
            mask = kv_cache.visible(first_query, S, M, window)[:, None]
            scores = scores.reshape(B, H, S, M) * attention.scale
            weights = masked_softmax(scores, mask).reshape(B, H * S, M)
            context = einsum("BQM,BMR->BQR", weights, latents)
        context = context.reshape(B, H, S, -1)[..., :rank]
        y = einsum("BHSR,HPR->BSHP", context, up_value).reshape(B, S, -1)
        return linear(y, self.o[...]), cache

    def _step(self, x_B1D, tables, start_B, window, cache):
        """One token of each row, by the host kernel."""
        attention = self.config
        q, low = linear_each(x_B1D, self._first(), self.kv_a[...])
        norm_R = self.kv_a_norm[...].astype(jnp.float32)
        given = self._queries(q)[:, 0], low[:, 0], cache["latent"], norm_R
        y_BHV, cache = native_attention.step_latent(
            *given,
            self.kv_b[...],
            tables,
            start_B,
            window,
            attention.scale,
            eps=self.eps,
            interleaved=attention.rope.interleaved,
            value=attention.value_dim,
        )
        y_B1R = y_BHV.reshape(*x_B1D.shape[:2], -1)
        return linear(y_B1R, self.o[...]), {"latent": cache}

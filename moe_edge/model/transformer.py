"""The transformer: embedding, blocks, head; one class for every family.

Modules hold the dense weights under canonical names (`attn.q`, `router.weight`,
`shared.up`, ...: attribute paths, see `convert/rules.py`). Routed experts are
arguments: a block receives its layer's records `experts_ER` and the function that
runs them, so that an engine may keep them anywhere, or not at all.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moe_edge.core.float32 import rounded, to_float32
from moe_edge.model.attention import NO_WINDOW, Attention
from moe_edge.model.branches import Norm, Shared, add_experts, leave_branch, seam
from moe_edge.model.config import ModelConfig
from moe_edge.model.delta_net import DeltaNet
from moe_edge.model.layers import (
    GatedMlp,
    add_bias,
    add_norm,
    add_params,
    new_matrix,
    norm,
    norm_scale,
)
from moe_edge.model.matvec import linear
from moe_edge.model.mla import LatentAttention
from moe_edge.model.record import RecordLayout
from moe_edge.model.rope import rope_tables
from moe_edge.model.router import Router, Routing
from moe_edge.model.shapes import block_shapes, norm_shapes
from moe_edge.model.short_conv import ShortConv

# (x_TD, ids_TK, weights_TK, experts_ER) -> y_TD, all float32.
ExpertFn = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


_MIXERS = {"gqa": Attention, "mla": LatentAttention, "conv": ShortConv}
_MIXERS |= {"delta": DeltaNet}


class Chunk(NamedTuple):
    """Where the tokens of a call stand in their sequences."""

    # Of every rope of the model (`config.ropes`): cosines, sines `[B, S, dim / 2]`.
    tables: tuple[tuple[jax.Array, jax.Array], ...]
    start_B: jax.Array  # int32, position of each row's first token
    valid_BS: jax.Array  # bool, False for padding: no expert computes it
    k_B: jax.Array | None = None  # int32, experts of a row's tokens; None: the model's

    def k_T(self, top_k: int) -> jax.Array:
        """int32, how many experts each token takes: 0 if it is padding."""
        k_B1 = jnp.int32(top_k) if self.k_B is None else self.k_B[:, None]
        return jnp.where(self.valid_BS, k_B1, 0).reshape(-1)


class Attended(NamedTuple):
    """The residual stream after a layer's attention."""

    x_BSD: jax.Array
    normed_BSD: jax.Array  # what the router and the experts take


def make_chunk(config: ModelConfig, start_B, valid_BS, k_B=None) -> Chunk:
    """Chunk of tokens at positions start_B[b], start_B[b] + 1, ..."""
    positions_BS = start_B[:, None] + jnp.arange(valid_BS.shape[1]).reshape(1, -1)
    tables = tuple(rope_tables(rope, positions_BS) for rope in config.ropes)
    return Chunk(tables, start_B, valid_BS, k_B)


class Block(nnx.Module):
    """One layer: attention, or what keeps a state, then experts or a dense MLP.

    A MoE layer's steps are separate methods, so that an engine may plan expert
    transfers between `route` and `add_experts`; `__call__` runs them all.
    """

    def __init__(self, config: ModelConfig, layer: int, rngs: nnx.Rngs):
        D, self.config = config.d_model, config
        self.is_moe = layer not in config.dense_layers
        attention = config.attention_of(layer)
        rope = attention.rope
        self.rope = None if rope is None else config.ropes.index(rope)
        add_params(self, block_shapes(config, layer), rngs)
        self.has_own_norms = self.is_moe and config.moe.own_norms
        self.has_state = attention.has_state
        self.attn = _MIXERS[attention.kind](config, layer, rngs)
        if not self.is_moe:
            self.mlp = GatedMlp(D, config.dense_dim, config.activation, rngs)
            return
        self.router = Router(config, rngs)
        if config.moe.shared_dim:
            self.shared = GatedMlp(D, config.moe.shared_dim, config.activation, rngs)
            if config.moe.shared_gate:
                self.shared_gate = new_matrix(rngs, 1, D)
        self.has_shared = config.moe.shared_dim > 0
        self.has_shared_gate = self.has_shared and config.moe.shared_gate

    def attend(self, x_BSD, chunk: Chunk, window, cache=None):
        """Adds attention to the residual stream; returns (Attended, cache)."""
        config, normed_BSD = self.config, self.norm_before("attn", x_BSD)
        tables = None if self.rope is None else chunk.tables[self.rope]
        if self.has_state:
            y, cache = self.attn(normed_BSD, chunk.valid_BS, cache)
        else:
            y, cache = self.attn(normed_BSD, tables, chunk.start_B, window, cache)
        y = leave_branch(config, y, self.norm_after("attn"))
        if config.norm_before and config.norm == "rms":
            scale_D = self._norm_before("mlp").scale_D
            found = add_norm(x_BSD, y, scale_D, config.norm_eps)
            return Attended(*found), cache
        x_BSD = x_BSD + y
        return Attended(x_BSD, self.norm_before("mlp", x_BSD)), cache

    def norm_before(self, branch: str, x_BSD) -> jax.Array:
        """What a branch, attn or mlp, takes."""
        if not self.config.norm_before:
            return x_BSD
        return norm(x_BSD, *self._norm_before(branch), self.config.norm_eps)

    def _norm_before(self, branch: str) -> Norm:
        if branch == "mlp" and self.has_own_norms:
            return Norm(jnp.ones(self.config.d_model, jnp.float32), None)
        return self._norm_of(f"{branch}_norm")

    def norm_after(self, branch: str) -> Norm | None:
        """The norm of what a branch gives, if it has one."""
        name = f"{branch}_after_norm"
        return self._norm_of(name) if self.config.norm_after else None

    def _norm_of(self, name: str) -> Norm:
        bias = getattr(self, name + "_bias", None)
        scale_D = norm_scale(getattr(self, name)[...], self.config.norm_plus_one)
        return Norm(scale_D, None if bias is None else bias[...])

    def route(self, normed_BSD, chunk: Chunk) -> tuple[jax.Array, Routing]:
        """Normed hidden states `[T, D]` and their routing.

        Padding, and ranks beyond a row's K, get id E.
        """
        hidden_TD = normed_BSD.reshape(-1, normed_BSD.shape[-1])
        return hidden_TD, self.router(hidden_TD, chunk.k_T(self.router.moe.top_k))

    def expert_input(self, hidden_TD, routing: Routing) -> jax.Array:
        """What the routed experts take, `[T, D]`."""
        if self.has_own_norms:
            return seam(hidden_TD * self._weights_of("expert_norm"))
        if not self.config.moe.input_scaled:
            return hidden_TD
        scores_TE = routing.scores_TE
        chosen_T1 = jnp.minimum(routing.ids_TK, scores_TE.shape[1] - 1)
        return seam(hidden_TD * jnp.take_along_axis(scores_TE, chosen_T1, axis=1))

    def _weights_of(self, name: str) -> jax.Array:
        return getattr(self, name)[...].astype(jnp.float32)[None]

    def run_shared(self, hidden_TD, routing: Routing) -> Shared:
        """The shared expert before its gate, and what its sum with others meets."""
        found = Shared(None, None, self.norm_after("mlp"))
        if self.has_own_norms:
            names = "expert_after_norm", "shared_after_norm"
            found = found._replace(own_after=tuple(map(self._norm_of, names)))
            hidden_TD = hidden_TD * self._weights_of("mlp_norm")
        if self.config.layer_scale:
            scale_1 = self.layer_scale[...].astype(jnp.float32)
            found = found._replace(scale_1=scale_1, ids_T1=routing.ids_TK[:, :1])
        if not self.has_shared:
            return found
        logit_T1 = None
        if self.has_shared_gate:
            logit_T1 = linear(hidden_TD, self.shared_gate[...])
        return found._replace(mlp_TD=self.shared(hidden_TD), logit_T1=logit_T1)

    def add_mlp(self, x_BSD, normed_BSD) -> jax.Array:
        """The residual stream after a dense layer's MLP."""
        y = self.mlp(normed_BSD)
        return x_BSD + leave_branch(self.config, y, self.norm_after("mlp"))

    def __call__(self, x_BSD, chunk, window, experts_ER, expert_fn, cache=None):
        """Runs the layer.

        Args:
          x_BSD: float32 residual stream.
          chunk: positions and padding of the tokens.
          window: int32 scalar, latest positions that a query sees.
          experts_ER: the layer's expert records (None in a dense layer).
          expert_fn: runs them, see `ExpertFn`.
          cache: the layer's cache, or None to attend within the chunk.
        Returns:
          (x_BSD, cache, Routing or None).
        """
        (x_BSD, normed_BSD), cache = self.attend(x_BSD, chunk, window, cache)
        if not self.is_moe:
            return self.add_mlp(x_BSD, normed_BSD), cache, None
        # The seams at which an offloading engine cuts the layer into programs.
        hidden, routing = seam(self.route(normed_BSD, chunk))
        shared = seam(self.run_shared(hidden, routing))
        taken = self.expert_input(hidden, routing)
        y_TD = expert_fn(taken, routing.ids_TK, routing.weights_TK, experts_ER)
        x_BSD = add_experts(self.config, x_BSD, seam(y_TD), shared)
        return x_BSD, cache, routing


def embed_tokens(config: ModelConfig, embed_VD, tokens_BS) -> jax.Array:
    """Rows of the embedding table, scaled, float32 `[B, S, D]`."""
    x_BSD = to_float32(embed_VD[tokens_BS])
    if config.embed_scale == 1:
        return x_BSD
    return rounded(x_BSD * jnp.float32(config.embed_scale), tokens_BS[..., None])


def logits_of(config: ModelConfig, top: Mapping[str, jax.Array], x) -> jax.Array:
    """Final norm and language-model head: `[..., D]` -> float32 `[..., V]`.

    Args:
      top: by canonical name, the final norm and the head or a tied embedding.
    """
    bias_D = top["final_norm_bias"] if config.norm == "layer" else None
    scale_D = norm_scale(top["final_norm"], config.norm_plus_one)
    x = norm(x, scale_D, bias_D, config.norm_eps)
    logits = linear(x, top["embed" if config.tie_embeddings else "head"])
    logits = add_bias(logits, top["head_bias"] if config.head_bias else None)
    logits = logits if config.logit_divisor == 1 else logits / config.logit_divisor
    if config.logit_cap is None:
        return logits
    return config.logit_cap * jnp.tanh(logits / config.logit_cap)


def layer_window(config: ModelConfig, layer: int) -> int:
    """The window of a layer as the integer that `Block` takes."""
    window = config.window(layer)
    return NO_WINDOW if window is None else window


TOP_NAMES = ("embed", "head", "head_bias", "final_norm", "final_norm_bias")


class Transformer(nnx.Module):
    """The whole model over one chunk without a cache: training and references."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = new_matrix(rngs, config.vocab_size, config.d_model)
        self.blocks = nnx.List(
            Block(config, layer, rngs) for layer in range(config.num_layers)
        )
        add_params(self, norm_shapes(config, "final_norm"), rngs)
        if config.head_bias:
            add_params(self, {"head_bias": (config.vocab_size,)}, rngs)
        if not config.tie_embeddings:
            self.head = new_matrix(rngs, config.vocab_size, config.d_model)

    def __call__(
        self,
        tokens_BS: jax.Array,
        experts: Sequence[jax.Array | None],
        expert_fn: ExpertFn,
        valid_BS: jax.Array | None = None,
        at_P: jax.Array | None = None,
    ) -> tuple[jax.Array, list[Routing | None]]:
        """Logits of every position, or of some, and the routing of every layer.

        Args:
          tokens_BS: int32, right-padded.
          experts: per layer the records `[E, R]` (None in dense layers).
          expert_fn: runs them.
          valid_BS: bool, False for padding; None if there is none.
          at_P: int32, places in `[B * S]` whose logits `[P, V]` are wanted; None: all.
        """
        config = self.config
        if valid_BS is None:
            valid_BS = jnp.ones(tokens_BS.shape, bool)
        start_B = jnp.zeros(tokens_BS.shape[0], jnp.int32)
        chunk = make_chunk(config, start_B, valid_BS)
        x_BSD = embed_tokens(config, self.embed[...], tokens_BS)
        routings = []
        for layer, block in enumerate(self.blocks):
            window = jnp.int32(layer_window(config, layer))
            x_BSD, _, routing = block(x_BSD, chunk, window, experts[layer], expert_fn)
            routings.append(routing)
        top = {n: getattr(self, n)[...] for n in TOP_NAMES if hasattr(self, n)}
        chosen = x_BSD if at_P is None else x_BSD.reshape(-1, x_BSD.shape[-1])[at_P]
        return logits_of(config, top, chosen), routings


def init_experts(config: ModelConfig, key: jax.Array) -> list[jax.Array | None]:
    """Fresh expert records per layer (None in dense layers); `key` is consumed."""
    layout = RecordLayout.of(config)
    shape = (config.moe.num_experts, layout.size)
    keys = jax.random.split(key, config.num_layers)
    return [
        0.02 * jax.random.normal(keys[layer], shape, jnp.float32)
        if layer in config.moe_layers
        else None
        for layer in range(config.num_layers)
    ]

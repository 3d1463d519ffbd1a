"""Jitted programs of a step, as an object that engines of one model share.

Programs are pure functions of arrays and belong to a model's config, not to an engine:
whoever builds a second engine of the same model hands it the first one's (`programs=`),
and nothing is compiled twice.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from moe_edge.core.checks import ConfigError
from moe_edge.engine.weights import bind_block, block_graph
from moe_edge.kernels import native
from moe_edge.model.config import ModelConfig
from moe_edge.model.expert_waves import ExpertWaves
from moe_edge.model.experts import choose_method
from moe_edge.model.matvec import compiler_options
from moe_edge.model.record import RecordLayout
from moe_edge.model.transformer import Block, embed_tokens, logits_of, make_chunk


def jit_step(function: Callable, **options):
    """Compiles a step's program: all engines with the same compiler options."""
    function = native.within(function)
    return jax.jit(function, compiler_options=compiler_options(), **options)


def count_compiled(owner) -> int:
    """How many programs (all shapes) the attributes of an object have compiled."""
    values = vars(owner).values()
    return sum(each._cache_size() for each in values if hasattr(each, "_cache_size"))


class TopPrograms:
    """Embedding and head, which do not depend on k: all operating points share them."""

    def __init__(self, config: ModelConfig):
        self._config = config
        # Further programs of the model, by their class: for whoever shares these.
        self.others: dict[type, object] = {}
        self.embed = jit_step(self.embed_step)
        self.head = jit_step(self.head_step)
        self.next_embed = jit_step(self.next_embed_step)
        self.next_head = jit_step(lambda top, x_B1D: self.head_step(top, x_B1D[:, 0]))
        self.last = jit_step(_pick_last)
        self.last_head = jit_step(self.last_head_step)

    def embed_step(self, embed_VD, tokens_BS, start_B, valid_BS, k_B=None):
        chunk = make_chunk(self._config, start_B, valid_BS, k_B)
        return embed_tokens(self._config, embed_VD, tokens_BS), chunk

    def next_embed_step(self, embed_VD, tokens_B, positions_B, active_B, k_B=None):
        """A token of each row; the positions of idle rows stay."""
        x_B1D, chunk = self.embed_step(
            embed_VD, tokens_B[:, None], positions_B, active_B[:, None], k_B
        )
        return x_B1D, chunk, positions_B + active_B.astype(positions_B.dtype)

    def head_step(self, top, x):
        """x `[..., D]` -> logits `[..., V]`."""
        return logits_of(self._config, top, x)

    def last_head_step(self, top, x_BSD, index_B):
        """Logits `[B, V]` of position index_B[b] of row b."""
        return self.head_step(top, _at(x_BSD, index_B))


class Programs:
    """All programs of one model at one k; a subclass adds those of layers.

    Args:
      config: the model.
      top: of another k, to share; None: new ones.
      block: class of the layers' modules.

    Attributes:
      kinds: of every layer, the first one of its kind (`ModelConfig.like`): what tells
        a program which kind of layer it runs.
    """

    def __init__(
        self,
        config: ModelConfig,
        top: TopPrograms | None = None,
        block: Callable[..., Block] = Block,
    ):
        self.config, self.top = config, top or TopPrograms(config)
        self.kinds = tuple(map(config.like, range(config.num_layers)))
        self._graphs = {
            kind: block_graph(config, kind, block) for kind in dict.fromkeys(self.kinds)
        }

    def bind(self, kind: int, flat) -> Block:
        """The module of a layer of a kind with its weights, while tracing."""
        return bind_block(self._graphs[kind], flat)

    def waves_of(self, tokens: int, dtype) -> ExpertWaves:
        """How so many tokens meet experts whose records have a dtype."""
        moe, layout = self.config.moe, RecordLayout.of(self.config)
        method = choose_method(tokens, dtype, kind=layout.kind)
        limits = moe.activation, moe.swiglu_limit
        return ExpertWaves(layout, moe.num_experts, method, *limits)

    def check(self, config: ModelConfig) -> None:
        """Raises ConfigError unless they are of this model."""
        if self.config != config:
            raise ConfigError(
                "these programs were made for another model or another k; share those "
                "of an engine with the same config"
            )

    def num_compiled(self) -> int:
        """How many have been compiled so far (all shapes)."""
        return count_compiled(self) + count_compiled(self.top)


def _pick_last(x_BSD, last_BD, index_B):
    """Row b of `last` becomes x[b, index_B[b]] where that lies in the chunk."""
    inside_B = (index_B >= 0) & (index_B < x_BSD.shape[1])
    return jnp.where(inside_B[:, None], _at(x_BSD, index_B), last_BD)


def _at(x_BSD, index_B):
    """`[B, D]`: position index_B[b] of row b, or the nearest there is."""
    at_B11 = jnp.clip(index_B, 0, x_BSD.shape[1] - 1)[:, None, None]
    return jnp.take_along_axis(x_BSD, at_B11, axis=1)[:, 0]

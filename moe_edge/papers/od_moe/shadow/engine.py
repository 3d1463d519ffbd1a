"""A shadow: the model at lower precision, as an engine whose weights all stay packed.

OD-MoE (arXiv 2512.03927, section 3.2): it runs a token ahead of the model, and what its
routers choose predicts what the model's will. Matrices have a format of
`shadow/formats.py`; dense ones of an nf4 shadow int8. Routers, norms and biases are as
stored, and in int8 and nf4 shadows also the embedding and the shared expert: 5 % of the
bytes that caused 60 % of the mispredictions (default model, int8 0.9932 -> 0.9972).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.core.checks import check_known
from moe_edge.core.float32 import to_float32
from moe_edge.engine.programs import TopPrograms, jit_step
from moe_edge.engine.resident import ResidentEngine, ResidentPrograms
from moe_edge.engine.session import Session
from moe_edge.engine.weights import Flat, Weights, num_bytes
from moe_edge.model import kv_cache
from moe_edge.model.config import ModelConfig
from moe_edge.model.record import RecordLayout
from moe_edge.model.sampling import likeliest
from moe_edge.model.transformer import Attended, Block
from moe_edge.papers.od_moe.shadow.formats import FORMATS, pack, round_to
from moe_edge.papers.od_moe.shadow.packed_experts import (
    pack_experts,
    run_packed_experts,
)
from moe_edge.papers.od_moe.shadow.predictor import PRECISIONS


class RoundedBlock(Block):
    """A block whose residual stream holds values of `fp16` or `bf16`."""

    def __init__(self, config: ModelConfig, layer: int, rngs, rounding: str):
        super().__init__(config, layer, rngs)
        self.rounding = rounding

    def attend(self, x_BSD, chunk, window, cache=None):
        attended, cache = super().attend(x_BSD, chunk, window, cache)
        x_BSD = round_to(attended.x_BSD, self.rounding)
        return Attended(x_BSD, self.norm_before("mlp", x_BSD)), cache

    def __call__(self, *args):
        x_BSD, *rest = super().__call__(*args)
        return round_to(x_BSD, self.rounding), *rest


class ShadowPrograms(ResidentPrograms):
    """The resident engine's programs for weights of one precision."""

    def __init__(
        self, config: ModelConfig, precision: str, top: TopPrograms | None = None
    ):
        block, is_packed = Block, precision in FORMATS
        if is_packed and (rounding := FORMATS[precision].rounding) is not None:
            block = functools.partial(RoundedBlock, rounding=rounding)
        super().__init__(config, top, block=block)
        self.precision = precision
        if is_packed:
            self.run_experts = functools.partial(
                run_packed_experts, **self.run_experts.keywords
            )
        self.next_tokens = jit_step(self._next_tokens)
        self.read_kv = jit_step(read_kv, static_argnames="count")
        self.copy_states = jit_step(_copy_states)
        self.write_kv = jit_step(_write_kv, donate_argnames="caches")
        self.copy_kv = jit_step(
            _copy_kv, static_argnames="count", donate_argnames="caches"
        )

    def _next_tokens(self, top, x_B1D):
        return likeliest(self.top.head_step(top, x_B1D[:, 0]))


class ShadowEngine(ResidentEngine):
    """Runs a model's shadow; also a model of its own, with prompts and logits.

    Args:
      weights: of `pack_weights`.
      precision: one of `PRECISIONS`.
      programs: of another shadow of this model and precision.
    """

    programs: ShadowPrograms

    def __init__(
        self,
        weights: Weights,
        precision: str,
        *,
        programs: ShadowPrograms | None = None,
    ):
        check_known("shadow precision", precision, PRECISIONS)
        self.precision = precision
        programs = programs or ShadowPrograms(weights.config, precision)
        # What a layer chooses is to be known before the next one runs.
        super().__init__(weights, layers_per_program=1, programs=programs)

    def _sibling(self, weights):
        programs = ShadowPrograms(weights.config, self.precision, self.programs.top)
        return ShadowEngine(weights, self.precision, programs=programs)

    def choose(self, session: Session, tokens_B, active_B):
        """A decode step without logits.

        Returns:
          (last hidden states `[B, 1, D]`, the experts of every layer int32 `[B, K]`,
          None in dense layers); arrays may still be on their way.
        """
        chosen: list[jax.Array | None] = [None] * self.config.num_layers

        def note(layer, routing):
            chosen[layer] = routing.ids_TK

        return self.step(session, tokens_B, active_B, note), chosen


def make_shadow(weights: Weights, precision: str, store=None) -> ShadowEngine:
    """The shadow of a model.

    Args:
      weights: the model on the device.
      precision: one of `PRECISIONS`.
      store: of the experts (`HostStore`), where the weights lack them.
    Raises:
      ConfigError: unknown precision.
    """
    check_known("shadow precision", precision, PRECISIONS)
    return ShadowEngine(pack_weights(weights, precision, store), precision)


def shared_shadow(
    weights: Weights, precision: str, made: dict[str, ShadowEngine], store=None
) -> ShadowEngine:
    """As `make_shadow`; one of each precision, kept in `made`."""
    if precision not in made:
        made[precision] = make_shadow(weights, precision, store)
    return made[precision]


def pack_weights(weights: Weights, precision: str, store=None) -> Weights:
    """A model's weights at a shadow's precision, layer by layer; see `make_shadow`."""
    layout, experts = RecordLayout.of(weights.config), list(weights.experts)
    for layer in weights.config.moe_layers:
        if experts[layer] is None:
            records = [store.record(layer, i) for i in range(store.num_experts)]
            experts[layer] = jnp.array(np.stack(records))
        if precision in FORMATS:
            experts[layer] = pack_experts(experts[layer], layout, precision)
    if precision not in FORMATS:
        return dataclasses.replace(weights, experts=tuple(experts))
    dense = _dense_format(precision)
    top, *layers = (_pack_flat(flat, dense) for flat in (weights.top, *weights.layers))
    return Weights(weights.config, top, tuple(layers), tuple(experts))


def shadow_bytes(
    weights: Weights, precision: str, records: jax.ShapeDtypeStruct
) -> int:
    """Bytes of what `pack_weights` makes, from shapes alone.

    Args:
      weights: dense ones, or their shapes.
      records: shape `[E, R]` and dtype of a layer's experts.
    """
    config, dense = weights.config, [weights.top, *weights.layers]
    experts = [records] * len(config.moe_layers)
    if precision in FORMATS:
        pack = functools.partial(_pack_flat, name=_dense_format(precision))
        dense = [jax.eval_shape(pack, flat) for flat in dense]
        layout = RecordLayout.of(config)
        packed = functools.partial(pack_experts, layout=layout, name=precision)
        experts = [jax.eval_shape(packed, records)] * len(experts)
    return num_bytes((dense, experts))


def _dense_format(precision: str) -> str:
    return "int8" if precision == "nf4" else precision


def _pack_flat(flat: Flat, name: str) -> Flat:
    kept = ["router.", "shared_gate"]
    if FORMATS[name].rounding is None:
        kept += ["shared.", "embed"]
    chosen = {
        key: array
        for key, array in flat.items()
        if array.ndim == 2 and not key.startswith(tuple(kept))
    }
    return {**flat, **_pack_all(chosen, name)}


@functools.partial(jax.jit, static_argnames="name")
def _pack_all(flat: Flat, name: str):
    return {key: pack(to_float32(array), name) for key, array in flat.items()}


# Keys and values of some positions as they are stored, and states whole: an array of
# each shape that caches have, also what a message carries.


def _groups(caches) -> dict[tuple[bool, tuple[int, ...]], list[jax.Array]]:
    """Arrays of all caches by whether they are states, and by shape."""
    groups: dict[tuple[bool, tuple[int, ...]], list[jax.Array]] = {}
    for cache in caches:
        for name, array in cache.items():
            key = name in kv_cache.STATES, array.shape
            groups.setdefault(key, []).append(array)
    return groups


def read_kv(caches, start_B, count: int) -> tuple[jax.Array, ...]:
    """Of each shape `[caches, rows, count, width]` from positions start_B[b] on; of
    states all: they stand behind the latest position."""

    def read(array, whole: bool):
        return array if whole else kv_cache.read(array, start_B, count)

    return tuple(
        jnp.stack([read(array, whole) for array in arrays])
        for (whole, _), arrays in _groups(caches).items()
    )


def cut_kv(caches, kv, count: int) -> list:
    """The first positions of what `read_kv` gave; states stay whole."""
    groups = zip(_groups(caches), kv, strict=True)
    return [each if whole else each[:, :, :count] for (whole, _), each in groups]


def widen_kv(caches, kv, capacity: int) -> list:
    """What `cut_kv` gave, with zeros up to a capacity: one shape for all."""
    groups = zip(_groups(caches), kv, strict=True)
    return [each if whole else _widened(each, capacity) for (whole, _), each in groups]


def _widened(kv, capacity: int) -> np.ndarray:
    missing = capacity - kv.shape[2]
    return np.pad(kv, ((0, 0), (0, 0), (0, missing), (0, 0)))


def _write_kv(caches, kv, start_B):
    new = dict(zip(_groups(caches), map(iter, kv), strict=True))

    def put(name, array):
        whole = name in kv_cache.STATES
        given = next(new[whole, array.shape])
        return given if whole else kv_cache.put(array, given, start_B)

    return [{name: put(name, cache[name]) for name in cache} for cache in caches]


def _copy_states(caches) -> list[dict[str, jax.Array]]:
    return [
        {name: jnp.copy(cache[name]) for name in cache if name in kv_cache.STATES}
        for cache in caches
    ]


def _copy_kv(caches, source, start_B, count: int):
    return _write_kv(caches, read_kv(source, start_B, count), start_B)

"""Routed experts at lower precision: the two forms of their sum (`experts.py`).

`pairs` decodes in the product, at the speed of memory; `blocks` decodes an expert once
for all its tokens.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from moe_edge.core.checks import check_shape
from moe_edge.model.expert_blocks import ffn, load_expert, run_blocks
from moe_edge.model.experts import add_pairs, choose_method
from moe_edge.model.layers import activate
from moe_edge.model.record import RecordLayout
from moe_edge.papers.od_moe.shadow.formats import LowPrecision, pack, round_to


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedExperts:
    """A layer's experts, or one of them without the first axis."""

    gate_up: LowPrecision  # [E, 2 F, D]
    down: LowPrecision  # [E, D, F]
    biases: jax.Array | None  # float32 [E, 2 F + D]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.gate_up.shape[:1]

    @property
    def dtype(self):
        return self.gate_up.dtype

    def load(self, expert):
        """What `expert_blocks.load_expert` gives of a record."""
        biases = None if self.biases is None else self.biases[expert]
        parts = self.gate_up.decode(expert), self.down.decode(expert), biases
        return lax.optimization_barrier(parts)

    def ffn(self, x_D: jax.Array, expert, act) -> jax.Array:
        """FFN of one expert on one token."""
        if not (self.gate_up.has_lanes and self.down.has_lanes):
            return ffn(x_D[None], self.load(expert), act)[0]
        F = self.down.width
        both_G = self.gate_up.multiply(x_D, expert)
        if self.biases is None:
            return self.down.multiply(act(both_G[:F], both_G[F:]), expert)
        biases = self.biases[expert]
        both_G = both_G + biases[: 2 * F]
        y_D = self.down.multiply(act(both_G[:F], both_G[F:]), expert)
        return y_D + biases[2 * F :]


@functools.partial(jax.jit, static_argnames=("layout", "name"))
def pack_experts(
    experts_ER: jax.Array, layout: RecordLayout, name: str
) -> PackedExperts:
    """A layer's records in the format `name`, one of `formats.FORMATS`."""

    def pack_one(record_R):
        gate_up_GD, down_DF, biases = load_expert(record_R[None], 0, layout)
        return PackedExperts(pack(gate_up_GD, name), pack(down_DF, name), biases)

    return lax.map(pack_one, experts_ER)  # one by one: float32 of a layer is large


def run_packed_experts(
    x_TD: jax.Array,
    ids_TK: jax.Array,
    weights_TK: jax.Array,
    experts: PackedExperts,
    layout: RecordLayout,
    *,
    activation: str = "silu",
    swiglu_limit: float | None = None,
    method: str | None = None,
) -> jax.Array:
    """As `experts.run_experts`, with experts of lower precision.

    Args:
      method: `pairs` or `blocks`; None: by the number of tokens.
    """
    check_shape("x_TD", x_TD, (None, layout.d_model))
    check_shape("weights_TK", weights_TK, ids_TK.shape)
    # Neither form needs a CPU: GPUs take the same two.
    method = method or choose_method(x_TD.shape[0], jnp.uint16, "cpu")
    kind = experts.gate_up.rounding

    def act(gate, up):
        gate, up = round_to(gate, kind), round_to(up, kind)
        return round_to(activate(gate, up, activation, swiglu_limit), kind)

    choice = round_to(x_TD, kind), ids_TK, weights_TK
    if method == "pairs":
        E, compute = experts.shape[0], functools.partial(_ffn_of, experts, act)
        y_TD = add_pairs(*choice, E, compute)
    else:
        load = lambda experts, expert, _: experts.load(expert)  # noqa: E731
        y_TD = run_blocks(*choice, experts, layout, act, load)
    return round_to(y_TD, kind)


def _ffn_of(experts, act, x_D, expert):
    return experts.ffn(x_D, expert, act)

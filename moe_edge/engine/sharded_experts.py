"""A layer's routed experts on several devices: each computes those that it holds.

Every device gets all tokens and computes the pairs (token, chosen expert) of its own
experts. A pair is computed on exactly one device; the others hold zeros in its row, so
that the sum of the devices' rows is each row as it was computed. Only then rows are
weighted and summed, in the order of one device: same bits. Of an expert that several
devices hold, every step chooses which one computes it (`replicas.py`).

For a few tokens the rows are summed on every device. A long prompt's are too many:
each device gets the rows of its share of the tokens (`psum_scatter`), sums them, and
all get the sums of all tokens, K times smaller (`all_gather`).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moe_edge.engine.mesh import AXIS, PARTED, WHOLE, DeviceMesh
from moe_edge.engine.replicas import Replicas, choose_devices, replicas_of
from moe_edge.model import expert_groups
from moe_edge.model.expert_blocks import sort_pairs
from moe_edge.model.expert_waves import ExpertWaves
from moe_edge.model.experts import choose_method
from moe_edge.model.record import RecordLayout
from moe_edge.offload.homes import homes_by_counts


class ShardedExperts(NamedTuple):
    """A layer's records on a mesh of N devices, S slots on each."""

    records_SR: jax.Array  # of all devices [N * S, R], each with its own S
    slot_NE: jax.Array  # int32, by device: where it holds an expert; S: it does not
    replicas: Replicas | None = None  # where several devices hold the same expert


def even_places(experts: int, devices: int) -> np.ndarray:
    """int32 [N, S]: the expert of each slot, E in an empty one; neighbours together."""
    slots = -(-experts // devices)
    places = np.arange(devices * slots, dtype=np.int32).reshape(devices, slots)
    return np.minimum(places, experts)


def counted_places(counts_E: np.ndarray, devices: int) -> np.ndarray:
    """As `even_places`, but each device has about as many uses of its experts."""
    (home_E,) = homes_by_counts(counts_E[None], devices)
    expert_NS = np.full_like(even_places(len(home_E), devices), len(home_E))
    for device, own_S in enumerate(expert_NS):
        held = np.flatnonzero(home_E == device)
        own_S[: len(held)] = held
    return expert_NS


def slots_of(expert_NS: np.ndarray, experts: int) -> np.ndarray:
    """int32 [N, E]: the table of `ShardedExperts`, from the expert of each slot."""
    N, S = expert_NS.shape
    slot_NE = np.full((N, experts + 1), S, np.int32)
    slot_NE[np.arange(N)[:, None], expert_NS] = np.arange(S, dtype=np.int32)
    return slot_NE[:, :experts]


def put_experts(
    mesh: DeviceMesh,
    records_ER: np.ndarray,
    expert_NS: np.ndarray,
    first: int = 0,
    experts: int | None = None,
) -> ShardedExperts:
    """A layer's records on the devices; those of empty slots are zeros.

    Args:
      records_ER: of the host, in the dtype that programs take.
      expert_NS: the expert of each slot, E where there is none.
      first: the expert of the first record, where they are those of this process alone.
      experts: E; None: as many as records.
    """
    (N, S), R = expert_NS.shape, records_ER.shape[1]
    E = len(records_ER) if experts is None else experts

    def part(device: int) -> np.ndarray:
        own_SR = np.zeros((S, R), records_ER.dtype)
        is_held_S = expert_NS[device] < E
        own_SR[is_held_S] = records_ER[expert_NS[device][is_held_S] - first]
        return own_SR

    slot_NE = slots_of(expert_NS, E)
    return ShardedExperts(
        mesh.put_parts((N * S, R), part),
        mesh.put_parts((N, E), lambda device: slot_NE[device : device + 1]),
        mesh.put(replicas_of(slot_NE < S, S)),
    )


def run_sharded(
    x_TD: jax.Array,
    ids_TK: jax.Array,
    weights_TK: jax.Array,
    experts: ShardedExperts,
    *,
    mesh: DeviceMesh,
    layout: RecordLayout,
    activation: str,
    swiglu_limit: float | None,
) -> jax.Array:
    """As `model.experts.run_experts`, on a mesh: float32 [T, D], on every device."""
    E, dtype = experts.slot_NE.shape[1], experts.records_SR.dtype
    method = choose_method(x_TD.shape[0], dtype, kind=layout.kind)
    waves = ExpertWaves(layout, E, method, activation, swiglu_limit)
    run = mesh.per_device(
        functools.partial(_run_own, waves=waves, devices=mesh.size),
        (WHOLE, WHOLE, WHOLE, ShardedExperts(PARTED, PARTED, WHOLE)),
    )
    return run(x_TD, ids_TK, weights_TK, experts)


def _run_own(x_TD, ids_TK, weights_TK, experts, *, waves: ExpertWaves, devices: int):
    """What one device does: the sum of all experts."""
    records_SR, (slot_E,), replicas = experts
    E, S = slot_E.shape[0], records_SR.shape[0]
    if replicas is not None:
        is_own_E = choose_devices(ids_TK, replicas) == lax.axis_index(AXIS)
        slot_E = jnp.where(is_own_E, slot_E, S)
    slot_TK = jnp.append(slot_E, S)[ids_TK]
    # A choice, not a product: outputs of padding tokens may have overflowed.
    weights_TK = jnp.where(ids_TK < E, weights_TK, 0.0)
    if waves.method == "blocks":
        rows_PD = waves.rows(x_TD, ids_TK, records_SR, slot_E)
        rows_PD = rows_PD[_places(ids_TK, E)]
    elif expert_groups.suits(records_SR, waves.layout):
        rows_PD = expert_groups.pair_rows(
            x_TD, slot_TK, records_SR, waves.layout, waves.act, weights_TK.reshape(-1)
        )
    else:
        rows_PD = waves.rows(x_TD, ids_TK, records_SR, slot_TK)
    rows_PD = jnp.where((slot_TK < S).reshape(-1, 1), rows_PD, 0.0)
    if waves.method == "blocks":
        return _sum_by_token(rows_PD, ids_TK, weights_TK, waves, devices)
    rows_PD = lax.psum(rows_PD, AXIS)
    if expert_groups.suits(records_SR, waves.layout):
        is_here_TK = ids_TK < E
        return expert_groups.add_ranks(jnp.zeros_like(x_TD), rows_PD, is_here_TK)
    return waves.sum_rows(rows_PD, ids_TK, weights_TK)


def _places(ids_TK, experts: int) -> jax.Array:
    """int32 [P]: where each pair stands in order of expert."""
    order_P, _ = sort_pairs(ids_TK, experts)
    places_P = jnp.arange(order_P.size, dtype=jnp.int32)
    return jnp.zeros_like(places_P).at[order_P].set(places_P, unique_indices=True)


def _sum_by_token(rows_PD, ids_TK, weights_TK, waves: ExpertWaves, devices: int):
    """The weighted sum `[T, D]` of rows of all devices, a share of tokens on each."""
    (T, K), D = weights_TK.shape, rows_PD.shape[1]
    share = -(-T // devices)
    first = lax.axis_index(AXIS) * share

    def filled(array):
        return jnp.pad(array, ((0, share * devices - T), (0, 0)))

    def own(array):
        return lax.dynamic_slice_in_dim(filled(array), first, share)

    rows_TJ = filled(rows_PD.reshape(T, K * D))
    own_TJ = lax.psum_scatter(rows_TJ, AXIS, scatter_dimension=0, tiled=True)
    own_PD = own_TJ.reshape(share * K, D)
    y_TD = waves.sum_in_order(own_PD, own(ids_TK), own(weights_TK))
    return lax.all_gather(y_TD, AXIS, tiled=True)[:T]

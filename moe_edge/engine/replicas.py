"""Copies of much used experts on several devices, of which each step computes one.

Where a device's experts happen to be chosen more than others', all wait for it. With
copies every step chooses anew which device computes an expert that several hold: the
expert with the most pairs (token, chosen expert) first, each on the device with the
least pairs so far. All devices derive the same choice from the same routing, so none is
told. All pairs of an expert stay together, and so its rows keep their bits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

UNIT = 1 << 20  # of uses, so that shares of them are whole numbers


class Replicas(NamedTuple):
    """Who holds the experts of a layer, the same on every device."""

    held_NE: jax.Array  # bool, whether a device holds an expert
    several_M: jax.Array  # int32, experts that several hold; E: no expert


def replicas_of(held_NE: np.ndarray, slots: int) -> Replicas | None:
    """None where no expert has copies; layers of equal sizes have equal shapes.

    Args:
      slots: S, of a device.
    """
    (N, E), copies_E = held_NE.shape, held_NE.sum(axis=0)
    several = np.flatnonzero(copies_E > 1)
    if not several.size:
        return None
    several_M = np.full(min(N * slots - E, E), E, np.int32)
    several_M[: several.size] = several
    return Replicas(held_NE, several_M)


def with_replicas(
    expert_NS: np.ndarray, counts_E: np.ndarray, replicas: int
) -> np.ndarray:
    """int32 [N, S + R]: places with R more slots a device and copies in all free ones.

    The expert with the most uses a copy gets the next one, where the uses of what a
    device holds are least. In whole numbers: every process finds the same places.

    Args:
      expert_NS: the expert of each slot, E in an empty one; every expert has one.
      replicas: R, at most E - S.
    """
    E, spare = len(counts_E), ((0, 0), (0, replicas))
    placed_NS = np.pad(expert_NS, spare, constant_values=E)
    held_NE = (placed_NS[:, :, None] == np.arange(E)).any(axis=1)
    # A little for those without uses, or one of them would get all copies.
    uses_E = counts_E.astype(np.int64) * UNIT + UNIT // 1024
    while (is_free_NS := placed_NS == E).any():
        share_E = uses_E // held_NE.sum(axis=0)
        fits_NE = is_free_NS.any(axis=1)[:, None] & ~held_NE
        expert = int(np.where(fits_NE.any(axis=0), share_E, -1).argmax())
        load_N = np.where(held_NE, share_E, 0).sum(axis=1)
        most = np.iinfo(np.int64).max
        device = int(np.where(fits_NE[:, expert], load_N, most).argmin())
        placed_NS[device, is_free_NS[device].argmax()] = expert
        held_NE[device, expert] = True
    return placed_NS


def choose_devices(ids_TK: jax.Array, replicas: Replicas) -> jax.Array:
    """int32 [E]: the one device that computes each expert in this step; to be traced.

    Args:
      ids_TK: int32 (tokens, chosen); E means "no expert".
    """
    held_NE, several_M = replicas
    E = held_NE.shape[1]
    pairs_E = jnp.bincount(ids_TK.reshape(-1), length=E + 1).astype(jnp.int32)
    pairs_E = pairs_E.at[E].set(0)
    uses_M = pairs_E[several_M]
    order_M = jnp.argsort(-uses_M, stable=True)
    alone_E = jnp.where(held_NE.sum(axis=0) == 1, pairs_E[:E], 0)
    pairs_N = jnp.where(held_NE, alone_E[None], 0).sum(axis=1)
    most = jnp.iinfo(jnp.int32).max

    def place(step, state):
        pairs_N, device_E = state
        place_M = order_M[step]
        expert = several_M[place_M]
        held_N = held_NE[:, jnp.minimum(expert, E - 1)]
        device = jnp.argmin(jnp.where(held_N, pairs_N, most)).astype(jnp.int32)
        device_E = device_E.at[expert].set(device, mode="drop")
        return pairs_N.at[device].add(uses_M[place_M]), device_E

    first_E = jnp.argmax(held_NE, axis=0).astype(jnp.int32)
    # Those that are used come first, and are no more than the pairs.
    steps = min(several_M.size, ids_TK.size)
    return lax.fori_loop(0, steps, place, (pairs_N, first_E))[1]

"""Blocks of a server onto its GPUs, after the choice per server (Prism, constraint 2).

A layer is as slow as its slowest GPU, so each layer's load is spread over the GPUs of
the server, by speed; memory binds over all layers together.
"""

from collections.abc import Sequence

import numpy as np

from moe_edge.place.plan import ABSENT


def pack(
    on_NLE: np.ndarray,
    slots: Sequence[np.ndarray],
    load_NLE: np.ndarray,
    speeds: Sequence[np.ndarray] | None = None,
) -> np.ndarray:
    """int8 [N, L, E]: the GPU of every block that is on its server, else -1.

    Args:
      on_NLE: bool, what each server holds; at most its slots.
      slots: of every server, blocks that fit on each GPU.
      load_NLE: work that a block makes at a server, any unit.
      speeds: of every server's GPUs, any unit; equal if None.
    """
    gpu_NLE = np.where(on_NLE, 0, ABSENT).astype(np.int8)
    for server, slots_G in enumerate(slots):
        if len(slots_G) > 1:
            speed_G = np.ones(len(slots_G)) if speeds is None else speeds[server]
            gpu_NLE[server] = _pack_server(
                on_NLE[server], slots_G, load_NLE[server], speed_G
            )
    return gpu_NLE


def served_load(frequency_NLE: np.ndarray, on_NLE: np.ndarray) -> np.ndarray:
    """float64 [N, L, E]: calls that a server's copy serves.

    Its own calls, and an equal share of the calls of servers without a copy.
    """
    remote_LE = np.where(on_NLE, 0.0, frequency_NLE).sum(axis=0)
    share_LE = remote_LE / np.maximum(on_NLE.sum(axis=0), 1)
    return np.where(on_NLE, frequency_NLE + share_LE, 0.0)


def quotas(count_L: np.ndarray, slots_G: np.ndarray) -> np.ndarray:
    """int64 [L, G]: blocks of each layer for each GPU, in proportion to free memory.

    Rows sum to count_L, columns stay within slots_G: a layer's share of a GPU is
    proportional to what is left there, so rounding up never passes it.
    """
    left_G = slots_G.astype(np.int64).copy()
    quota_LG = np.zeros((len(count_L), len(slots_G)), np.int64)
    for layer, count in enumerate(count_L):
        exact_G = count * left_G / max(left_G.sum(), 1)
        quota_G = np.floor(exact_G).astype(np.int64)
        short = int(count - quota_G.sum())
        quota_G[np.argsort(quota_G - exact_G, kind="stable")[:short]] += 1
        quota_LG[layer] = quota_G
        left_G -= quota_G
    return quota_LG


def _pack_server(
    on_LE: np.ndarray, slots_G: np.ndarray, load_LE: np.ndarray, speed_G: np.ndarray
) -> np.ndarray:
    """Longest first to the least busy GPU with quota left; all layers side by side."""
    gpu_LE = np.full(on_LE.shape, ABSENT, np.int8)
    count_L = on_LE.sum(axis=1)
    free_LG = quotas(count_L, slots_G)
    busy_LG = np.zeros(free_LG.shape)
    order_LE = np.argsort(np.where(on_LE, -load_LE, np.inf), axis=1, kind="stable")
    for place in range(int(count_L.max())):
        layers = np.flatnonzero(count_L > place)
        blocks = order_LE[layers, place]
        seconds_XG = busy_LG[layers] + load_LE[layers, blocks, None] / speed_G
        gpus = np.where(free_LG[layers] > 0, seconds_XG, np.inf).argmin(axis=1)
        busy_LG[layers, gpus] += load_LE[layers, blocks] / speed_G[gpus]
        free_LG[layers, gpus] -= 1
        gpu_LE[layers, blocks] = gpus
    return gpu_LE

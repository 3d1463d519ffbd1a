"""Blocks of a server on its GPUs, and numbers shared out in proportion."""

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

    After the choice per server (Prism, constraint 2). A layer is as slow as its slowest
    GPU, so each layer's load is spread over the GPUs of the server, by speed; memory
    binds over all layers together.

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
    left_G = slots_G.astype(np.int64)
    quota_LG = np.zeros((len(count_L), len(slots_G)), np.int64)
    for layer, count in enumerate(count_L):
        quota_LG[layer] = apportion(count, left_G)
        left_G = left_G - quota_LG[layer]
    return quota_LG


def apportion(total: int, weight_X: np.ndarray) -> np.ndarray:
    """int64 [X] that sum to `total`, in proportion to weights.

    What rounding down leaves goes to the largest fractions, the first of equals.
    """
    exact_X = total * weight_X / (weight_X.sum() or 1)
    whole_X = np.floor(exact_X).astype(np.int64)
    fraction_X = np.where(weight_X > 0, exact_X - whole_X, -1.0)
    short = int(total - whole_X.sum())
    whole_X[np.argsort(-fraction_X, kind="stable")[:short]] += 1
    return whole_X


def share_out(total: int, weight_X: np.ndarray, limit_X) -> np.ndarray:
    """int64 [X] that sum to `total`, in proportion to weights within the limits.

    What a full one cannot take is shared among the others, in proportion again; in
    equal parts where only those without weight have room. The limits sum to `total` at
    least.
    """
    share_X = np.zeros(len(weight_X), np.int64)
    while (left := total - int(share_X.sum())) > 0:
        open_X = share_X < limit_X
        open_weight_X = np.where(open_X, weight_X, 0.0)
        if not open_weight_X.any():
            open_weight_X = open_X.astype(np.float64)
        share_X = np.minimum(share_X + apportion(left, open_weight_X), limit_X)
    return share_X


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

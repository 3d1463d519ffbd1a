"""Fits probes: what names the experts that a later layer chooses, on an earlier state.

Ours. An expert's value is linear in the state, plus what gated neurons add; its sigmoid
says how likely a token chooses the expert, and the K largest name the token's. Rows and
neurons are trained on nine tenths of the text by the cross-entropy of each choice; the
tenth says their recall.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from moe_edge.core.checks import ConfigError
from moe_edge.model.matvec import dot

STRETCH, EVERY = 512, 10  # tokens: of ten stretches the last is held out
ROWS = 8192  # of a product: states lie in files
BATCH, PASSES, STEPS = 1024, 24, (1000, 4000)  # tokens a step; at least, at most
RATE, DECAY = 3e-3, 1e-2
FIRST_VALUE = -2.0  # few experts are chosen
CONSTANT = 1e-6  # of its mean: a coordinate that varies less is one
CLIP = 10.0  # norm of gradients

Params = dict[str, Any]


class Probe(NamedTuple):
    """What was fitted.

    Attributes:
      rows_EC: float32, C = D + 1: an expert's row, and its constant.
      neurons_NX: float32, X = 2 (D + 1) + E: a neuron's gate and its constant, its row
        and its constant, and what it adds to each expert.
      recall: share of the chosen experts that it names, on text that it had not seen.
    """

    rows_EC: np.ndarray
    neurons_NX: np.ndarray
    recall: float


def fit_probe(
    x_PD: np.ndarray,
    place_T: np.ndarray,
    ids_TK: np.ndarray,
    num_experts: int,
    num_neurons: int,
) -> Probe:
    """Trains a probe.

    Args:
      x_PD: float32 states that a layer's experts took, perhaps in a file.
      place_T: the row of each token, in order of the text.
      ids_TK: experts that a later layer chose for the same tokens.
    Raises:
      ConfigError: training did not converge.
    """
    T = len(place_T)
    held_T = np.arange(T) // STRETCH % EVERY == EVERY - 1
    if not held_T.any():
        held_T[-max(T // EVERY, 1) :] = True
    seen, held = np.flatnonzero(~held_T), np.flatnonzero(held_T)
    # All over the text, whose domains follow each other.
    some_TD = x_PD[place_T[seen[:: -(-len(seen) // ROWS)]]].astype(np.float64)
    mean_D, spread_D = some_TD.mean(axis=0), some_TD.std(axis=0)
    spread_D = np.where(spread_D > CONSTANT * (1 + np.abs(mean_D)), spread_D, 1)
    mean_D, spread_D = mean_D.astype(np.float32), spread_D.astype(np.float32)
    steps = int(np.clip(PASSES * len(seen) // BATCH, *STEPS))
    optimizer, step = _trainer(steps)
    params = _first(x_PD.shape[1], num_experts, num_neurons)
    state, rng = optimizer.init(params), np.random.default_rng(0)
    for _ in range(steps):
        part = rng.choice(seen, BATCH)
        x_TD = (x_PD[place_T[part]] - mean_D) / spread_D
        params, state = step(params, state, x_TD, _chosen(ids_TK[part], num_experts))
    rows_EC, neurons_NX = _written(jax.device_get(params), mean_D, spread_D)
    if not (np.isfinite(rows_EC).all() and np.isfinite(neurons_NX).all()):
        raise ConfigError(
            "training a probe gave values that are not finite; give more text, or "
            "--probes 0"
        )
    named = sum(
        _named(values_of(rows_EC, neurons_NX, x_PD[place_T[part]]), ids_TK[part])
        for part in _parts(held)
    )
    return Probe(rows_EC, neurons_NX, named / ids_TK[held].size)


def values_of(rows_EC, neurons_NX, x_TD) -> np.ndarray:
    """What a written probe says of states: its largest values name experts.

    Args:
      rows_EC, neurons_NX: see `Probe`.
      x_TD: states that a layer's experts took.
    Returns:
      float32 `[T, E]`.
    """
    C = rows_EC.shape[1]
    gate_TN, up_TN = (
        x_TD @ part_NC[:, :-1].T + part_NC[:, -1]
        for part_NC in (neurons_NX[:, :C], neurons_NX[:, C : 2 * C])
    )
    active_TN = gate_TN / (1 + np.exp(-np.clip(gate_TN, -80, 80))) * up_TN
    more_TE = active_TN @ neurons_NX[:, 2 * C :]
    return x_TD @ rows_EC[:, :-1].T + rows_EC[:, -1] + more_TE


def _first(D: int, E: int, N: int) -> Params:
    """Neurons at random that add nothing yet."""
    rng, scale = np.random.default_rng(0), np.float32(D**-0.5)
    zero = functools.partial(np.zeros, dtype=np.float32)
    return {
        "row_DE": zero((D, E)),
        "row_E": np.full(E, FIRST_VALUE, np.float32),
        "gate_DN": scale * rng.standard_normal((D, N), np.float32),
        "gate_N": zero(N),
        "up_DN": scale * rng.standard_normal((D, N), np.float32),
        "up_N": zero(N),
        "out_NE": zero((N, E)),
    }


def _values(params: Params, x_TD: jax.Array) -> jax.Array:
    gate_TN = dot(x_TD, params["gate_DN"].T) + params["gate_N"][None]
    up_TN = dot(x_TD, params["up_DN"].T) + params["up_N"][None]
    more_TE = dot(jax.nn.silu(gate_TN) * up_TN, params["out_NE"].T)
    return dot(x_TD, params["row_DE"].T) + params["row_E"][None] + more_TE


@functools.cache
def _trainer(steps: int):
    """(optimizer, one step of it)."""
    rate = optax.cosine_decay_schedule(RATE, steps)
    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIP), optax.adamw(rate, weight_decay=DECAY)
    )

    def loss(params, x_TD, chosen_TE):
        values_TE = _values(params, x_TD)
        each_TE = optax.sigmoid_binary_cross_entropy(values_TE, chosen_TE)
        return each_TE.sum(axis=1).mean()

    @jax.jit
    def step(params, state, x_TD, chosen_TE):
        with jax.numpy_dtype_promotion("standard"):  # optax mixes float and int
            grads = jax.grad(loss)(params, x_TD, chosen_TE)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

    return optimizer, step


def _written(params: Params, mean_D, spread_D) -> tuple[np.ndarray, np.ndarray]:
    """(rows, neurons) of states as they are, from those of states with mean 0 and
    spread 1."""

    def folded(weight_DN, bias_N):
        weight_DN = weight_DN / spread_D[:, None]
        return np.concatenate([weight_DN.T, (bias_N - mean_D @ weight_DN)[:, None]], 1)

    ends = {
        name: folded(params[f"{name}_DN"], params[f"{name}_N"])
        for name in ("gate", "up")
    }
    neurons_NX = np.concatenate([*ends.values(), params["out_NE"]], axis=1)
    rows_EC = folded(params["row_DE"], params["row_E"])
    return rows_EC.astype(np.float32), neurons_NX.astype(np.float32)


def _chosen(ids_TK: np.ndarray, num_experts: int) -> np.ndarray:
    """float32 [T, E]: 1 where a token chose the expert."""
    chosen_TE = np.zeros((len(ids_TK), num_experts), np.float32)
    np.put_along_axis(chosen_TE, ids_TK, 1.0, axis=1)
    return chosen_TE


def _parts(tokens: np.ndarray) -> Iterator[np.ndarray]:
    """ROWS of them at a time."""
    for first in range(0, len(tokens), ROWS):
        yield tokens[first : first + ROWS]


def _named(values_TE: np.ndarray, ids_TK: np.ndarray) -> int:
    """How many of the chosen experts are among the K best."""
    K = ids_TK.shape[1]
    best_TK = np.argpartition(-values_TE, K - 1, axis=1)[:, :K]
    return int((best_TK[:, :, None] == ids_TK[:, None]).sum())

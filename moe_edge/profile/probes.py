"""Fits linear probes: which experts a later layer chooses, from an earlier state.

Ours. For every expert of the later layer ridge regression of whether a token chooses
it; the K largest values name the token's experts. How strongly coefficients are held
down is chosen by the recall on a tenth of the text, and then all of it is fitted.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from moe_edge.core.ridge import solve_ridge

PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # of the mean variance of a coordinate
STRETCH, EVERY = 512, 10  # tokens: of ten stretches the last is held out
LEAST_TOKENS = 64  # of a text
ROWS = 8192  # of a product: states lie in files


class Probe(NamedTuple):
    """What was fitted.

    Attributes:
      rows_EC: float32, C = D + 1: an expert's row, and its constant.
      recall: share of the chosen experts that it names, on text that it had not seen.
      penalty: that was chosen.
    """

    rows_EC: np.ndarray
    recall: float
    penalty: float


def fit_probe(
    x_PD: np.ndarray, place_T: np.ndarray, ids_TK: np.ndarray, num_experts: int
) -> Probe:
    """Rows that name experts.

    Args:
      x_PD: float32 states of a layer's router, perhaps in a file.
      place_T: the row of each token, in order of the text.
      ids_TK: experts that a later layer chose for the same tokens.
    """
    T = len(place_T)
    held_T = np.arange(T) // STRETCH % EVERY == EVERY - 1
    if not held_T.any():
        held_T[-max(T // EVERY, 1) :] = True
    # Near the mean, so that float32 products of what is left are exact enough.
    shift_D = x_PD[place_T[:ROWS]].mean(axis=0)
    text = Text(x_PD, place_T, ids_TK, shift_D, num_experts)
    fitted, kept = (text.sums(np.flatnonzero(which)) for which in (~held_T, held_T))
    held = np.flatnonzero(held_T)
    recalls = [text.recall(held, *one) for one in fitted.solve(PENALTIES)]
    best = int(np.argmax(recalls))
    ((weight_DE, bias_E),) = (fitted + kept).solve((PENALTIES[best],))
    bias_E = bias_E - shift_D @ weight_DE
    rows_EC = np.concatenate([weight_DE.T, bias_E[:, None]], axis=1)
    return Probe(rows_EC.astype(np.float32), recalls[best], PENALTIES[best])


@dataclasses.dataclass(frozen=True)
class Sums:
    """Of shifted states: products with each other and with choices, and counts."""

    gram_DD: np.ndarray
    cross_DE: np.ndarray
    state_D: np.ndarray
    count_E: np.ndarray
    tokens: int

    def __add__(self, other: "Sums") -> "Sums":
        mine, others = vars(self), vars(other)
        return Sums(*(mine[name] + others[name] for name in mine))

    def solve(self, penalties) -> list[tuple[np.ndarray, np.ndarray]]:
        """(coefficients [D, E], constants [E]) of shifted states, for each penalty."""
        T = self.tokens
        mean_D, share_E = self.state_D / T, self.count_E / T
        gram_DD = self.gram_DD - T * np.outer(mean_D, mean_D)
        cross_DE = self.cross_DE - T * np.outer(mean_D, share_E)
        weights = [solve_ridge(gram_DD, cross_DE, penalty) for penalty in penalties]
        return [(weight_DE, share_E - mean_D @ weight_DE) for weight_DE in weights]


@dataclasses.dataclass(frozen=True)
class Text:
    """States of a text and what a later layer chose; see `fit_probe`."""

    x_PD: np.ndarray
    place_T: np.ndarray
    ids_TK: np.ndarray
    shift_D: np.ndarray
    num_experts: int

    def parts(self, tokens: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Shifted states [t, D] and choices [t, K] of some tokens, ROWS at a time."""
        for first in range(0, len(tokens), ROWS):
            some = tokens[first : first + ROWS]
            yield self.x_PD[self.place_T[some]] - self.shift_D, self.ids_TK[some]

    def sums(self, tokens: np.ndarray) -> Sums:
        """Of some tokens."""
        D, E = self.x_PD.shape[1], self.num_experts
        gram_DD, cross_DE, state_D = np.zeros((D, D)), np.zeros((D, E)), np.zeros(D)
        for x_tD, ids_tK in self.parts(tokens):
            chosen_tE = np.zeros((len(ids_tK), E), np.float32)
            np.put_along_axis(chosen_tE, ids_tK, 1.0, axis=1)
            gram_DD += x_tD.T @ x_tD
            cross_DE += x_tD.T @ chosen_tE
            state_D += x_tD.sum(axis=0)
        count_E = np.bincount(self.ids_TK[tokens].ravel(), minlength=E)
        return Sums(gram_DD, cross_DE, state_D, count_E.astype(float), len(tokens))

    def recall(self, tokens: np.ndarray, weight_DE, bias_E) -> float:
        """Share of the chosen experts of some tokens that are among the K best."""
        K, named = self.ids_TK.shape[1], 0
        for x_tD, ids_tK in self.parts(tokens):
            values_tE = x_tD @ weight_DE + bias_E
            best_tK = np.argpartition(-values_tE, K - 1, axis=1)[:, :K]
            named += int((best_tK[:, :, None] == ids_tK[:, None]).sum())
        return named / (K * len(tokens))

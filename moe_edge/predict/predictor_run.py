"""A predictor at work: what each sequence has shown it, and how right it was."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.core.plug_in import is_ours
from moe_edge.core.plug_in_result import kind_of, wrong_result
from moe_edge.predict.accuracy import PredictionLog
from moe_edge.predict.base import (
    NOT_WANTED,
    ModelShape,
    Predictor,
    State,
    best_first,
    target_layers,
)


class PredictorRun:
    """Joins a predictor, its records of the running sequences, and that of its hits.

    Attributes:
      horizon: layers ahead that the predictor is asked about.
      accuracy: what it named compared with what was chosen.
      is_idle: whether it never names anything.
      moe_layers: layers that have experts; None: not known.
    """

    moe_layers: Collection[int] | None = None

    def __init__(self, predictor: Predictor, spec: ModelShape, horizon: int):
        self.predictor, self.horizon, self._spec = predictor, horizon, spec
        self.is_idle = type(predictor) is Predictor  # the base names nothing
        self._is_foreign = not is_ours(predictor)
        self._observes = predictor.observes and not self.is_idle
        self.restart()
        self.reset_accuracy()

    def restart(self) -> None:
        """Forgets everything that was seen."""
        self._fresh = self.predictor.init(self._spec)
        self._states: dict[int, State] = {}
        self._last: tuple[int, ...] = (0,)  # sequences of the latest observation

    @property
    def state(self) -> State:
        """What the latest sequence has seen; what all have, before the first."""
        return self._states.get(self._last[0], self._fresh)

    def reset_accuracy(self) -> None:
        """Counts from here on."""
        spec = self._spec
        self.accuracy = PredictionLog(spec.num_layers, spec.num_experts, self.horizon)

    def reads(self, what: str) -> bool:
        """Whether `observe` is to be given this."""
        return self._observes and what in self.predictor.needs

    def show(
        self,
        layer: int,
        ids_TK,
        scores_TE,
        hidden_TD=None,
        *,
        sequences: Sequence[int],
        shape_BS: tuple[int, int],
    ) -> None:
        """Takes in what a layer chose for a batch: as much of it as the predictor asks
        for, of a prompt the last token of every row or all, row by row or together.

        Args:
          ids_TK, scores_TE, hidden_TD: as of `observe`, T = B * S; id E is padding.
          sequences: numbers of the rows' sequences.
          shape_BS: of the tokens; S is 1 in decoding.
        """
        B, S = shape_BS
        sequence_T: int | np.ndarray = sequences[0]
        apart = B > 1 and self.predictor.per_sequence
        if apart:
            sequence_T = np.repeat(np.array(sequences), S)
        shown: list[Any] = [ids_TK, scores_TE, hidden_TD]
        if S > 1 and not self.predictor.whole_prompt:
            last_B = last_tokens(ids_TK, shape_BS, self._spec.num_experts)
            shown = [None if each is None else each[last_B] for each in shown]
            sequence_T = np.asarray(sequence_T)[last_B] if apart else sequence_T
        ids_TK, scores_TE, hidden_TD = shown
        self.observe(layer, ids_TK, scores_TE, hidden_TD, sequence_T=sequence_T)

    def observe(
        self,
        layer: int,
        ids_TK,
        scores_TE,
        hidden_TD=None,
        counts: bool = True,
        sequence_T=None,
    ) -> None:
        """Takes in what a layer chose.

        Args:
          scores_TE, hidden_TD: None where it does not read them (`reads`).
          counts: compare what had been named for the layer.
          sequence_T: the number of the tokens' sequence, or one for each token; None:
            all are of one.
        """
        if counts:
            self.accuracy.chosen(layer, ids_TK)
        if not self._observes:
            return
        if sequence_T is None or not self.predictor.per_sequence:
            sequence_T = 0
        shown = hidden_TD, ids_TK, scores_TE if self.reads("scores") else None
        if isinstance(sequence_T, int):
            self._observe(sequence_T, layer, shown)
            self._last = (sequence_T,)
            return
        sequence_T = np.asarray(sequence_T)
        # A row that has ended chooses nothing, and its record stays as it was.
        real_T = ids_TK[:, 0] < self._spec.num_experts
        self._last = tuple(dict.fromkeys(sequence_T[real_T].tolist())) or self._last
        for sequence in self._last:
            mine_T = real_T & (sequence_T == sequence)
            if mine_T.any():
                mine = [None if each is None else each[mine_T] for each in shown]
                self._observe(sequence, layer, mine)

    def _observe(self, sequence: int, layer: int, shown) -> None:
        state = self._states.get(sequence, self._fresh)
        state = self.predictor.observe(state, layer, *shown)
        self._states[sequence] = self._checked("observe", state)

    def store(self, layer: int, wanted_NE) -> None:
        """Takes the scores that an engine's program computed for the predictor.

        They are of all rows together: each running sequence's record gets them.
        """
        for sequence in self._last:
            state = self._states.get(sequence, self._fresh)
            state = self.predictor.store(state, layer, wanted_NE)
            self._states[sequence] = self._checked("store", state)

    def _checked(self, method: str, state: State) -> State:
        if state is None:  # as of a method without a return
            what = f"predictor {self.predictor.name}"
            raise wrong_result(what, method, state, "the state from now on, a dict")
        return state

    def predict(self, layer: int) -> np.ndarray:
        """int32 `[horizon, M]` ids for the layers after `layer`; see `Predictor`.

        Of several sequences: what any of them is expected to choose, by best score.
        """
        found = [
            self.predictor.predict(
                self._states.get(sequence, self._fresh), layer, self.horizon
            )
            for sequence in self._last
        ]
        if self._is_foreign:
            self._check(layer, found)
        ids_NM = found[0][0]
        if len(found) > 1:
            shape = self.horizon, self._spec.num_experts + 1
            wanted_NE = np.full(shape, NOT_WANTED, np.float32)
            row_N1 = np.arange(self.horizon)[:, None]
            for ids, scores in found:  # id -1 is the spare column
                np.maximum.at(wanted_NE, (row_N1, ids), scores)
            ids_NM, _ = best_first(wanted_NE[:, :-1])
        self.accuracy.expect(layer, ids_NM)
        return ids_NM

    def _check(self, layer: int, found) -> None:
        """Raises ConfigError for a prediction that is none."""
        E, N, name = self._spec.num_experts, self.horizon, self.predictor.name
        targets = target_layers(layer, N, self._spec.num_layers).tolist()
        dense = [t not in (self.moe_layers or targets) for t in targets]
        for each in found:
            kinds: list = []
            if isinstance(each, (tuple, list)):
                kinds = [kind_of(array) for array in each]
            if kinds not in (["i", "f"], ["u", "f"]):
                raise wrong_result(
                    f"predictor {name}",
                    "predict",
                    each,
                    "arrays (ids int32, scores float32)",
                )
        for ids, scores in found:
            fits = ids.ndim == 2 and ids.shape == scores.shape and len(ids) == N
            if not fits or ((ids < -1) | (ids >= E)).any() or (ids[dense] >= 0).any():
                raise ConfigError(
                    f"predictor {name} gave after layer {layer} ids {ids.tolist()} and "
                    f"scores of shape {scores.shape}; expected a row for each layer of "
                    f"{targets}, ids from 0 to {E - 1}, -1 for none and in layers "
                    "without experts"
                )

    def learn(self, sequences) -> None:
        """Sees past sequences, which count nowhere; between sequences only.

        Args:
          sequences: per sequence {layer: int32 [T, K] chosen experts}.
        """
        if not self._observes:
            return
        for ids_of in sequences:
            for layer in sorted(ids_of):
                self.observe(layer, ids_of[layer], None, counts=False)
            self.finish_sequences()

    def finish_sequences(self, running: Collection[int] = ()) -> None:
        """All but the running sequences end; what was named and not compared goes."""
        for number in [n for n in self._states if n not in running]:
            state = self._states.pop(number)
            fresh = self.predictor.finish_sequence(state, self._fresh)
            self._fresh = self._checked("finish_sequence", fresh)
        self._last = tuple(n for n in self._last if n in self._states) or (0,)
        self.accuracy.forget_waiting()


def last_tokens(ids_TK: np.ndarray, shape_BS, num_experts: int) -> np.ndarray:
    """Index of the last real token of every row that has one; padding is id E."""
    B, S = shape_BS
    real_BS = ids_TK[:, 0].reshape(B, S) < num_experts
    last_B = S - 1 - np.argmax(real_BS[:, ::-1], axis=1)
    return (np.arange(B) * S + last_B)[real_BS.any(axis=1)]

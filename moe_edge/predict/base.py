"""The interface of predictors: which experts the coming layers will choose.

A predictor is a frozen object; what it has seen is an explicit `State`. After layer
`l` it names experts for the layers after it, best first, so that a prefetcher may
stop wherever the link is full.
"""

import dataclasses
from typing import Any, ClassVar, Protocol

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.core.plug_in import PlugIn, Registry, register

State = dict[str, Any]

NOT_WANTED = -1.0  # below every score
NEEDS = frozenset({"ids", "scores", "hidden", "partial_state", "shadow", "future"})


class ModelShape(Protocol):
    """What `init` needs of its spec (`offload.evict_base.CacheSpec` has it)."""

    num_layers: int
    num_experts: int
    top_k: int


@dataclasses.dataclass(frozen=True)
class Predictor(PlugIn):
    """Names experts of the coming layers; this one, the base, names none.

    Mode layered, replay and the cluster simulator call, always on the host,

        init             once, and after a reset
        observe          after a layer's routing, with what `needs` asks for
        store            mode layered, decoding: with the scores that its programs
                         computed for `gates_after(layer)`, a partial state or a shadow
        predict          after that, once a layer and decode step
        finish_sequence  when a sequence ends

    Mode fused reads no routing on the host: with `prefetch_in_fused` its programs run
    the `gates_after` of those that only look ahead (`stale_gate.LooksAhead`), or the
    next layer's router on a partial state (`stale_gate.is_by_programs`), and it refuses
    others. Replay and the simulator have the choices of a trace, some traces
    the scores, and refuse what else a predictor needs.

    Attributes:
      needs: what it reads of a run, of NEEDS: scores and hidden states, which `observe`
        gets only if they are named; ids, which it always gets; a partial_state or a
        shadow, from which the engine computes what `store` gets; the future, which
        replay alone knows.
      from_context: of model, top_k, dense_layers, profile (of `profile_trace`), and in
        replay choices, the recorded ones.
      whole_prompt: `observe` wants all tokens of a prompt. If not, the engine passes
        the last token of every row only, whose successor is predicted.
      observes: False: `observe` is not called; the engine computes scores (`store`).
      per_sequence: its state is the record of one sequence, of which `PredictorRun`
        then keeps one for each that runs.
      look_ahead: int, how many layers ahead it names experts; None: any. A longer
        `horizon` is refused.
      top_a: float, with partial_state: the margin of the experts that it wants, as of
        `device_scores.wanted_scores`; None: all that the next layer would choose.
    """

    name: ClassVar[str] = "none"
    SOURCE: ClassVar[str] = "nothing is fetched ahead"
    needs: ClassVar[frozenset[str]] = frozenset()
    whole_prompt: ClassVar[bool] = False
    observes: ClassVar[bool] = True
    per_sequence: ClassVar[bool] = False
    # Not annotated: subclasses have options of these names, whose order would change.
    look_ahead = None  # type: int | None
    top_a = None  # type: float | None

    def init(self, spec: ModelShape) -> State:
        """State before the first token."""
        return {}

    def observe(self, state: State, layer: int, hidden_TD, ids_TK, scores_TE) -> State:
        """Takes in what a layer's router saw and chose.

        Args:
          state: never changed; the new one is returned.
          layer: the model's layer index (dense layers count, but are not observed).
          hidden_TD: float32, normed hidden states, as experts take them. None if
            `needs` lacks "hidden", and for past sequences (`PredictorRun.learn`).
          ids_TK: int32 chosen experts, best first; E is padding.
          scores_TE: float32 scores of all experts, as shares or gates (`gate_scores`).
            None if `needs` lacks "scores", and for past sequences.
        """
        return state

    def store(self, state: State, layer: int, wanted_NE) -> State:
        """Takes in scores that a program of the engine computed for it, in decoding.

        Args:
          state: never changed; the new one is returned.
          layer: on whose state they were computed; -1 before the first (a shadow's).
          wanted_NE: float32, a row for each gate of `gates_after(layer)`; with
            "partial_state" one row, of the next layer; of a shadow a row a layer.
            `NOT_WANTED` where an expert is not wanted.
        """
        return state

    def predict(
        self, state: State, layer: int, horizon: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Experts of the next `horizon` layers, after `layer` was observed.

        Returns:
          (ids, scores), int32 and float32 `[horizon, M]`: row j belongs to layer
          `target_layers(...)[j]`; best first, padded with id -1 and score
          `NOT_WANTED`. Rows of dense layers, and of layers nothing is known about,
          are padding only. M is as small as the rows allow, possibly 0.
        """
        return no_prediction(horizon)

    def gates_after(self, layer: int) -> tuple:
        """Gates that the engine runs on the state of `layer`, in decoding only.

        What they say goes to `store`; see `device_scores.scores_ahead`. () asks for
        none.
        """
        return ()

    def companion(self, weights, store, made: dict[str, Any] | None = None) -> Any:
        """What runs ahead of the model, where `needs` names a shadow.

        Args:
          weights: the model's, on the device.
          store: of its experts, where the weights lack them.
          made: engines that companions of one model share, by name; grows.
        Returns:
          an `engine.companion.Companion`.
        Raises:
          ConfigError: a predictor that needs one and does not write this.
        """
        raise ConfigError(
            f"predictor {self.name} needs a shadow and does not say which; write "
            "companion, as moe_edge.Predictor says"
        )

    def companion_bytes(self, weights, records) -> int:
        """Bytes of the weights of `companion`, from shapes alone.

        Args:
          weights: dense ones, or their shapes.
          records: shape `[E, R]` and dtype of a layer's experts.
        """
        return 0

    def finish_sequence(self, state: State, fresh: State) -> State:
        """A sequence ends.

        Args:
          state: of the sequence.
          fresh: the state from which sequences have begun so far.
        Returns:
          the state from which they begin from now on.
        """
        return fresh


def check_look_ahead(predictor: Predictor, horizon: int) -> None:
    """Raises ConfigError if a horizon exceeds what the predictor looks ahead."""
    limit = predictor.look_ahead
    if limit is not None and limit < horizon:
        raise ConfigError(
            f"horizon {horizon} exceeds what {predictor.name} looks ahead ({limit}); "
            "lower it or use n_layer_gate"
        )


PREDICTORS = Registry("predictor", Predictor, "predictor_options", "moe_edge.predict")
register(Predictor)


def get_predictor(predictor: str | type | Predictor, **options) -> Predictor:
    """The predictor of a name, a class, or an object; options are fields of its class.

    Raises:
      ConfigError: an unknown name or option, one of another type, or a missing one.
    """
    return PREDICTORS.make(predictor, options)


def target_layers(layer: int, horizon: int, num_layers: int) -> np.ndarray:
    """Layers of a prediction's rows: layer + 1, ..., then the next token's first."""
    return (layer + 1 + np.arange(horizon)) % num_layers


def no_prediction(horizon: int) -> tuple[np.ndarray, np.ndarray]:
    """A prediction without experts."""
    return np.zeros((horizon, 0), np.int32), np.zeros((horizon, 0), np.float32)


def best_first(
    wanted_NE: np.ndarray, limit: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Sorts experts by score; ties go to the lower id.

    Args:
      wanted_NE: scores; negative where an expert is not wanted.
      limit: keep at most so many of a row.
    Returns:
      ids int32 and scores float32 `[N, M]`, see `Predictor.predict`.
    """
    wanted_NE = np.asarray(wanted_NE, np.float32)
    width = int((wanted_NE >= 0).sum(axis=1).max(initial=0))
    width = width if limit is None else min(width, limit)
    order_NM = np.argsort(-wanted_NE, axis=1, kind="stable")[:, :width]
    # Not `take_along_axis`, which takes ten times as long for a few rows.
    scores_NM = wanted_NE[np.arange(len(wanted_NE))[:, None], order_NM]
    is_wanted = scores_NM >= 0
    if is_wanted.all():
        return order_NM.astype(np.int32), scores_NM
    ids_NM = np.where(is_wanted, order_NM, -1).astype(np.int32)
    return ids_NM, np.where(is_wanted, scores_NM, np.float32(NOT_WANTED))


def rank_scores(ids_TK: np.ndarray, num_experts: int) -> np.ndarray:
    """Float32 [E]: (K - best rank) / K of every chosen expert, else `NOT_WANTED`."""
    K = ids_TK.shape[1]
    wanted_E = np.full(num_experts + 1, NOT_WANTED, np.float32)
    by_rank_K = (1.0 - np.arange(K, dtype=np.float32) / K)[None]
    if len(ids_TK) == 1:  # each expert once
        wanted_E[ids_TK] = by_rank_K
        return wanted_E[:num_experts]
    np.maximum.at(wanted_E, ids_TK, np.broadcast_to(by_rank_K, ids_TK.shape))
    return wanted_E[:num_experts]


def count_experts(ids_TK: np.ndarray, num_experts: int) -> np.ndarray:
    """Float32 [E]: how many of the tokens chose each expert."""
    counts = np.bincount(ids_TK.reshape(-1), minlength=num_experts + 1)
    return counts[:num_experts].astype(np.float32)


def with_row(array: np.ndarray, row: int, values: np.ndarray) -> np.ndarray:
    """A copy of `array` with one row replaced."""
    array = array.copy()
    array[row] = values
    return array

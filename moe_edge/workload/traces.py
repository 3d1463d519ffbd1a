"""Route traces in memory: what the router chose for every token at every layer.

Rows of one step and one layer were looked up together in the cache. Steps rise over
the whole run: a prefill has one step a prompt token, a decode step serves a batch.
`trace_reader.py` and `trace_writer.py` are their files.
"""

import dataclasses
import functools

import numpy as np

from moe_edge.core.checks import ConfigError, check_count, check_shape

PREFILL, DECODE = 0, 1
IDS = ("ids_TK", "holder_TK")  # -1 where a token has fewer than K
OPTIONAL = ("scores_TE", "server", "version", "holder_TK")  # of a recorder's lookups


@dataclasses.dataclass(frozen=True)
class Trace:
    """Routing of T rows (one token at one layer), in order of step and layer.

    Attributes:
      num_experts: E, experts of a layer.
      top_k: K, most experts a token may have.
      request: int32 [T], as are phase (0 prefill, 1 decode), step and layer.
      ids_TK: int32, chosen experts, best first, -1 where a token has fewer than K.
      weights_TK: float32, gate weights, 0 where ids are -1.
      hit_TK: bool, whether the expert was on the device; None = not recorded.
      bytes_TK: int64, bytes moved for it; None = not recorded.
      wait_s_TK: float32, seconds waited for it; None = not recorded.
      scores_TE: float16, scores of all experts; None = not recorded.
      server: int32 [T], the server of a cluster that asked; None = no cluster's run.
      version: int32 [T], number of its table of targets; likewise.
      holder_TK: int32, the server that computed it, -1 where ids are; likewise.
    Raises:
      ConfigError: arrays whose sizes disagree, or no row at all.
    """

    num_experts: int
    top_k: int
    request: np.ndarray
    phase: np.ndarray
    step: np.ndarray
    layer: np.ndarray
    ids_TK: np.ndarray
    weights_TK: np.ndarray
    hit_TK: np.ndarray | None = None
    bytes_TK: np.ndarray | None = None
    wait_s_TK: np.ndarray | None = None
    scores_TE: np.ndarray | None = None
    server: np.ndarray | None = None
    version: np.ndarray | None = None
    holder_TK: np.ndarray | None = None

    def __post_init__(self):
        T = len(self.step)
        if T == 0:
            raise ConfigError("a route trace needs at least one row; got 0")
        last = {"_TK": (self.top_k,), "_TE": (self.num_experts,)}
        for field in dataclasses.fields(self)[2:]:
            array = getattr(self, field.name)
            if array is not None:
                check_shape(field.name, array, (T, *last.get(field.name[-3:], ())))

    @property
    def num_layers(self) -> int:
        """Layers up to the last one that routes (a model may have more)."""
        return int(self.layer.max()) + 1

    @property
    def holds(self) -> frozenset[str]:
        """What policies and predictors may need and this trace has.

        A finished trace knows its future and its profile.
        """
        scores = {"scores"} if self.scores_TE is not None else set()
        return frozenset({"ids", "weights", "future", "profile"} | scores)

    @functools.cached_property
    def bounds(self) -> np.ndarray:
        """int [G + 1]: lookup g is rows bounds[g] : bounds[g + 1]."""
        keys_T3 = np.stack([self.step, self.layer, self.phase], axis=1)
        new = (np.diff(keys_T3, axis=0) != 0).any(axis=1)
        return np.concatenate([[0], np.flatnonzero(new) + 1, [len(self.step)]])


def ordered_trace(num_experts: int, top_k: int, **arrays: np.ndarray | None) -> Trace:
    """A Trace of rows in any order; rows of one step and layer keep theirs."""
    order = np.lexsort((arrays["layer"], arrays["step"]))
    rows = {k: None if v is None else v[order] for k, v in arrays.items()}
    return Trace(num_experts, top_k, **rows)


def expert_counts(trace: Trace, phase: int) -> np.ndarray:
    """int [L, E]: tokens of a phase that chose each expert."""
    L, E = trace.num_layers, trace.num_experts
    chosen_TK = (trace.ids_TK >= 0) & (trace.phase == phase)[:, None]
    keys_TK = trace.layer[:, None] * E + trace.ids_TK
    return np.bincount(keys_TK[chosen_TK], minlength=L * E).reshape(L, E)


class TraceRecorder:
    """Collects a trace while an engine runs: one cheap `add` a lookup."""

    def __init__(self, num_experts: int, top_k: int):
        check_count("num_experts", num_experts)
        check_count("top_k", top_k)
        self.num_experts, self.top_k = num_experts, top_k
        self._chunks: list[dict] = []

    def __len__(self) -> int:
        return len(self._chunks)

    def clear(self) -> None:
        """Forgets what was recorded, for example by a warm-up."""
        self._chunks.clear()

    def add(
        self,
        phase: int,
        step,
        layer: int,
        ids_TK,
        weights_TK,
        hit_TK,
        bytes=0,
        wait_s=0.0,
        scores_TE=None,
        request_T=None,
        server=None,
        version=None,
        holder_TK=None,
    ) -> None:
        """Records one lookup; rows whose ids are all -1 or E (padding) are dropped.

        Args (those of `Trace`, and here):
          step: in prefill int [T], one a prompt token.
          ids_TK: -1 or E where there is no expert.
          bytes, wait_s: of the whole lookup, or [T, K].
          scores_TE, server, version, holder_TK: in every lookup or in none.
          request_T: default: rows of a decode step are requests 0, 1, ..., a prefill is
            of request 0.
        """
        # Copies: the engine may reuse its buffers.
        ids_TK = np.array(ids_TK, np.int32)
        T = len(ids_TK)
        chosen_TK = (ids_TK >= 0) & (ids_TK < self.num_experts)
        if request_T is None:
            request_T = np.arange(T) if phase == DECODE else 0
        columns = {"request": request_T, "phase": phase, "step": step, "layer": layer}
        scores_TE = None if scores_TE is None else np.array(scores_TE, np.float16)
        holder_TK = None if holder_TK is None else np.array(holder_TK, np.int32)
        own = {"server": server, "version": version}
        self._chunks.append(
            {
                name: np.broadcast_to(np.array(column, np.int32), (T,))
                for name, column in columns.items()
            }
            | {
                "ids_TK": np.where(chosen_TK, ids_TK, -1),
                "weights_TK": np.array(weights_TK, np.float32),
                "hit_TK": np.array(hit_TK, bool),
                "bytes_TK": _at_first(bytes, chosen_TK, np.int64),
                "wait_s_TK": _at_first(wait_s, chosen_TK, np.float32),
                "scores_TE": scores_TE,
                "holder_TK": holder_TK,
            }
            | {
                n: None if v is None else np.full(T, v, np.int32)
                for n, v in own.items()
            }
        )

    def trace(self) -> Trace:
        """Everything recorded so far.

        Raises:
          ConfigError: nothing, ids of another width, or scores of some lookups only.
        """
        if not self._chunks:
            raise ConfigError("the run recorded no lookup: a trace needs at least one")
        left_out = [name for name in OPTIONAL if not self._recorded(name)]
        for name in ("ids_TK", "weights_TK", "hit_TK"):
            for chunk in self._chunks:
                check_shape(name, chunk[name], (len(chunk["ids_TK"]), self.top_k))
        rows = {
            name: np.concatenate([chunk[name] for chunk in self._chunks])
            for name in self._chunks[0]
            if name not in left_out
        }
        return ordered_trace(self.num_experts, self.top_k, **self._clean(rows))

    def _recorded(self, name: str) -> bool:
        """Whether all lookups have what may be left out; ConfigError if only some."""
        has = [chunk[name] is not None for chunk in self._chunks]
        if any(has) and not all(has):
            raise ConfigError(
                f"{name.partition('_')[0]} were recorded in {sum(has)} of {len(has)} "
                "lookups, expected all or none"
            )
        return has[0]

    def _clean(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Without padding; a token's experts come first, its empty places last."""
        chosen_TK = rows["ids_TK"] >= 0
        order_TK = np.argsort(~chosen_TK, axis=1, kind="stable")
        for name in (n for n in rows if n.endswith("_TK")):
            empty = np.array(-1 if name in IDS else 0, rows[name].dtype)
            kept_TK = np.where(chosen_TK, rows[name], empty)
            rows[name] = np.take_along_axis(kept_TK, order_TK, axis=1)
        return {name: array[chosen_TK.any(axis=1)] for name, array in rows.items()}


def _at_first(value, chosen_TK: np.ndarray, dtype) -> np.ndarray:
    """[T, K]; what a whole lookup cost stands at its first chosen expert."""
    value = np.array(value, dtype)
    if value.ndim:
        return value
    spread_TK = np.zeros(chosen_TK.shape, dtype)
    if chosen_TK.any():
        spread_TK.flat[chosen_TK.argmax()] = value
    return spread_TK

"""What a server notes while it runs: routing, who computed it, calls and their times.

One append a layer or call; arrays are made when the scheduler asks.
"""

import time

import numpy as np

from moe_edge.cluster.tables import View
from moe_edge.cluster.transport import Call
from moe_edge.workload.traces import DECODE, PREFILL


class Ledger:
    """Notes of one server.

    The engine's thread appends; one other thread at a time asks and adds up.

    Attributes:
      me: this server.
      states, rows: hidden states sent and rows returned, of its own calls.
      local_pairs, pairs: computed here, and all; as of the last `counts`, as are
      remote_blocks: blocks a step and layer that others computed.
    """

    def __init__(self, me: int, num_servers: int, shape_LE: tuple[int, int]):
        self.me, self._shape, self._servers = me, shape_LE, num_servers
        self.clear()

    def clear(self) -> None:
        """Forgets all, as after a warm-up."""
        self.pairs_LE = np.zeros(self._shape, np.int64)
        self.calls_LE = np.zeros(self._shape, np.int64)
        self.call_s_N = np.zeros(self._servers)
        self.blocks_N = np.zeros(self._servers, np.int64)
        self.states = self.rows = 0
        self.pairs = self.local_pairs = self.remote_blocks = 0
        self._lookups: list[tuple] = []
        self._added = 0  # of the lookups
        self._calls: list[tuple] = []
        self._token = (-1, True)
        self._step = self._width = 0  # of the trace: where a chunk begins, its tokens

    def token(self, request: int, is_decode: bool) -> None:
        """A step of a request begins."""
        self._token = request, is_decode

    def chunk(self) -> None:
        """A chunk of tokens enters the first layer."""
        self._step += self._width
        self._width = 0

    def looked_up(self, layer: int, ids_TK, weights_TK, view: View) -> None:
        """A layer chose blocks; the view says who computes them."""
        if not self._width:
            real_T = ids_TK[:, 0] < self._shape[1]
            self._width = 1 if len(ids_TK) == 1 else int(np.count_nonzero(real_T))
        where = *self._token, self._step, layer
        self._lookups.append((*where, ids_TK, weights_TK, view))

    def _add_up(self) -> None:
        """Counts the lookups that have come since the last time."""
        E, lookups = self._shape[1], self._lookups
        for place in range(self._added, len(lookups)):
            layer, ids_TK, _, view = lookups[place][3:]
            counts_E = np.bincount(ids_TK.reshape(-1), minlength=E + 1)[:E]
            away_E = (view.target_LE[layer, :E] != self.me) & (counts_E > 0)
            self.pairs_LE[layer] += counts_E
            self.calls_LE[layer] += counts_E > 0
            pairs, away = int(counts_E.sum()), int(counts_E[away_E].sum())
            self.pairs += pairs
            self.local_pairs += pairs - away
            self.remote_blocks += int(np.count_nonzero(away_E))
            self._added = place + 1

    def called(self, server: int, call: Call, rows: np.ndarray, sent_s: float) -> None:
        """A call has come back whole."""
        ended_s = time.perf_counter()
        states, back = len(call.x_TD), len(rows)
        self.states += states
        self.rows += back
        request, is_decode = self._token
        if is_decode:
            self.call_s_N[server] += ended_s - sent_s
            self.blocks_N[server] += len(call.block_P)
        num_bytes = call.x_TD.nbytes + rows.nbytes + 4 * len(call.block_P)
        where = server, call.layer, request, len(call.block_P), states, back
        self._calls.append((sent_s, ended_s - sent_s, *where, num_bytes))

    def counts(self) -> dict[str, np.ndarray]:
        """What the scheduler's placer wants: since `clear`, never reset here."""
        self._add_up()
        return {
            "pairs_LE": self.pairs_LE,
            "calls_LE": self.calls_LE,
            "call_s_N": self.call_s_N,
            "blocks_N": self.blocks_N,
        }

    def lookups(self) -> dict[str, np.ndarray]:
        """Rows of a route trace: request, phase, step, layer, ids, weights, holder,
        version; a row a token and layer, padding left out."""
        parts = []
        for *where, ids_TK, weights_TK, view in self._lookups:
            request, is_decode, first_step, layer = where
            target_TK, version = view.target_LE[layer][ids_TK], view.version
            real_T = np.flatnonzero(ids_TK[:, 0] < self._shape[1])
            T = len(real_T)
            phase = DECODE if is_decode else PREFILL
            numbers = [(request, phase, 0, layer, version)] * T
            numbers = np.array(numbers, np.int32).reshape(T, 5)
            numbers[:, 2] = first_step + np.arange(T)
            some = ids_TK[real_T], weights_TK[real_T], target_TK[real_T]
            parts.append((numbers, *some))
        K = self._lookups[0][4].shape[1] if self._lookups else 0
        empty = [np.zeros((0, n)) for n in (5, K, K, K)]
        numbers_T5, ids_TK, weights_TK, holder_TK = (
            np.concatenate(arrays)
            for arrays in (zip(*parts, strict=True) if parts else zip(empty))
        )
        request, phase, step, layer, version = numbers_T5.T.astype(np.int32)
        return {
            "request": request,
            "phase": phase,
            "step": step,
            "layer": layer,
            "version": version,
            "ids_TK": ids_TK.astype(np.int32),
            "weights_TK": weights_TK.astype(np.float32),
            "holder_TK": holder_TK.astype(np.int16),
        }

    def calls(self) -> np.ndarray:
        """float64 [C, 9]: sent_s and dur_s by this machine's counter, server, layer,
        request, pairs, states, rows, bytes."""
        return np.array(self._calls, np.float64).reshape(-1, 9)

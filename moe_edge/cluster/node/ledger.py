"""What a server notes while it runs: routing, who computed it, calls and their times.

One append a layer or call. From time to time what was appended becomes arrays of what
is needed (`_pack`), so that nothing else stays in memory and a question is quick.
"""

import threading

import numpy as np

from moe_edge.cluster.node.tables import View
from moe_edge.cluster.transport.base import Call
from moe_edge.workload.traces import DECODE, PREFILL

PACK = 2048  # lookups that become arrays together
COLUMNS = ("request", "phase", "step", "layer", "version")
COLUMNS += ("ids_TK", "weights_TK", "holder_TK")


class Ledger:
    """Notes of one server.

    The engine's thread appends; other threads may ask.

    Attributes:
      me: this server.
      states, rows: hidden states sent and rows returned, of its own calls.
      local_pairs, pairs: computed here, and all; as of the last `counts` or `sums`, as
        are remote_blocks: blocks a step and layer that others computed.
    """

    def __init__(self, me: int, num_servers: int, shape_LE: tuple[int, int]):
        self.me, self._shape, self._servers = me, shape_LE, num_servers
        self._lock = threading.Lock()  # of lookups that are not packed yet
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
        self._packed: list[dict[str, np.ndarray]] = []
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
        with self._lock:
            self._lookups.append((*where, ids_TK, weights_TK, view))
        if len(self._lookups) >= PACK:
            self._pack()

    def _pack(self) -> None:
        """Turns lookups into arrays and counts them."""
        with self._lock:
            lookups, self._lookups = self._lookups, []
            start = 0
            for end in range(1, len(lookups) + 1):
                view = lookups[start][-1]
                if end == len(lookups) or lookups[end][-1] is not view:
                    self._pack_some(lookups[start:end], view)
                    start = end

    def _pack_some(self, lookups: list[tuple], view: View) -> None:
        """The same of lookups that went by one view."""
        columns = zip(*(lookup[:-1] for lookup in lookups), strict=True)
        request, is_decode, step, layer, ids, weights = columns
        size_G = [len(ids_TK) for ids_TK in ids]
        lookup_T = np.repeat(np.arange(len(size_G)), size_G)
        first_T = np.repeat(np.cumsum(size_G) - size_G, size_G)
        ids_TK, weights_TK = np.concatenate(ids), np.concatenate(weights)
        real_T = ids_TK[:, 0] < self._shape[1]  # padding stands at the end
        step_T = np.array(step)[lookup_T] + np.arange(len(ids_TK)) - first_T
        layer_T, lookup_T = np.array(layer)[lookup_T][real_T], lookup_T[real_T]
        ids_TK = ids_TK[real_T]
        holder_TK = view.target_LE[layer_T[:, None], ids_TK]
        phase_G = np.where(np.array(is_decode), DECODE, PREFILL)
        self._count(lookup_T, layer_T, ids_TK, holder_TK)
        self._packed.append(
            {
                "request": np.array(request, np.int32)[lookup_T],
                "phase": phase_G.astype(np.int32)[lookup_T],
                "step": step_T[real_T].astype(np.int32),
                "layer": layer_T.astype(np.int32),
                "version": np.full(len(ids_TK), view.version, np.int32),
                "ids_TK": ids_TK.astype(np.int32),
                "weights_TK": weights_TK[real_T].astype(np.float32),
                "holder_TK": holder_TK.astype(np.int16),
            }
        )

    def _count(self, lookup_T, layer_T, ids_TK, holder_TK) -> None:
        """Adds up pairs, and blocks a step and layer."""
        L, E = self._shape
        lookup_P, ids_P = np.repeat(lookup_T, ids_TK.shape[1]), ids_TK.reshape(-1)
        cell_P = np.repeat(layer_T, ids_TK.shape[1]) * E + ids_P
        away_P = holder_TK.reshape(-1) != self.me
        self.pairs_LE += np.bincount(cell_P, minlength=L * E).reshape(L, E)
        _, first_A = np.unique(lookup_P * E + ids_P, return_index=True)
        asked = np.bincount(cell_P[first_A], minlength=L * E)
        self.calls_LE += asked.reshape(L, E)
        self.pairs += len(cell_P)
        self.local_pairs += int(np.count_nonzero(~away_P))
        self.remote_blocks += int(np.count_nonzero(away_P[first_A]))

    def called(
        self, server: int, call: Call, rows: np.ndarray, sent_s: float, ended_s: float
    ) -> None:
        """A call has come back whole."""
        states, back = len(call.x_TD), len(rows)
        self.states += states
        self.rows += back
        request, is_decode = self._token
        if is_decode:
            self.call_s_N[server] += ended_s - sent_s
            self.blocks_N[server] += len(call.block_P)
        num_bytes = call.x_TD.nbytes + rows.nbytes + 4 * len(call.block_P)
        where = server, call.layer, request, len(call.block_P), states, back
        self._calls.append((sent_s, ended_s - sent_s, *where, num_bytes, is_decode))

    def counts(self) -> dict[str, np.ndarray]:
        """What the scheduler's placer wants: since `clear`, never reset here."""
        self._pack()
        return {
            "pairs_LE": self.pairs_LE,
            "calls_LE": self.calls_LE,
            "call_s_N": self.call_s_N,
            "blocks_N": self.blocks_N,
        }

    def sums(self) -> dict[str, int]:
        """What of all was sent, came back, and was computed where, since `clear`."""
        self._pack()
        names = "states", "rows", "pairs", "local_pairs", "remote_blocks"
        return {name: getattr(self, name) for name in names}

    def lookups(self) -> dict[str, np.ndarray]:
        """Rows of a route trace: request, phase, step, layer, ids, weights, holder,
        version; a row a token and layer, padding left out."""
        self._pack()
        if not self._packed:
            return {
                name: np.zeros((0, 0) if name.endswith("_TK") else 0, np.int32)
                for name in COLUMNS
            }
        parts = self._packed
        return {name: np.concatenate([p[name] for p in parts]) for name in COLUMNS}

    def calls(self) -> np.ndarray:
        """float64 [C, 10]: sent_s and dur_s by this machine's counter, server, layer,
        request, pairs, states, rows, bytes, whether of a decode step."""
        return np.array(self._calls, np.float64).reshape(-1, 10)

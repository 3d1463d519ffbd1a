"""What a server answers: the rows of the pairs that others ask for.

It runs in the thread that serves calls, in their order, and calls nobody, so two
servers never wait for each other. A block that is nobody's, since servers were lost and
no slot is free, is read for the call and not kept (`on_demand`).
"""

import dataclasses
import threading

import numpy as np

from moe_edge.cluster.node.holdings import Holdings
from moe_edge.cluster.node.programs import PlacedPrograms
from moe_edge.cluster.transport.base import Call
from moe_edge.core.checks import RequestError


class Answers:
    """Computes calls on the blocks of a server.

    Attributes:
      computed: pairs since the start, all callers' together.
      reading: held while blocks are read for a call; slots that it may use must not be
        emptied meanwhile.
    """

    def __init__(self, programs: PlacedPrograms, holdings: Holdings):
        self._programs, self._holdings = programs, holdings
        moe = programs.config.moe
        self._experts, self._top_k = moe.num_experts, moe.top_k
        self._layers = set(programs.config.moe_layers)
        self.computed = 0
        self.reading = threading.RLock()  # one slot is enough for what is not kept

    def compute(self, call: Call, on_demand: bool = False) -> np.ndarray | None:
        """Rows of a call; None if a block is not here.

        Args:
          on_demand: read what is not here from the checkpoint instead, if a slot is
            free.
        Returns:
          float32: a row a pair in the order of the call.
        Raises:
          RequestError: a layer, block or number of tokens that cannot be.
        """
        self.check(call)
        if on_demand:
            with self.reading:
                return self._read_and_compute(call)
        slot_E = self._holdings.slot_LE[call.layer]
        if (slot_E[call.block_P] == self._holdings.nowhere).any():
            return None
        return self.run(call, slot_E)

    def rehearse(self, call: Call) -> np.ndarray:
        """Rows without meaning, from slot 0: the programs of a call are compiled."""
        return self.run(call, np.zeros(self._experts, np.int32))

    def check(self, call: Call) -> None:
        """Raises RequestError for what cannot be computed."""
        tokens, bucket = len(call.x_TD), call.bucket
        block_P = call.block_P
        if call.layer not in self._layers or (
            len(block_P) and int(block_P.max()) >= self._experts
        ):
            raise RequestError(
                f"a call asks for layer {call.layer}, block {block_P.max(initial=0)}, "
                f"expected one of layers {sorted(self._layers)}, below {self._experts}"
            )
        most = len(block_P) if bucket == 1 else np.bincount(call.token_P).max(initial=0)
        if not 0 < tokens <= bucket or most > self._top_k:
            raise RequestError(
                f"a call has {tokens} tokens for {bucket} rows and {most} blocks of "
                f"one token, expected at most {self._top_k}"
            )

    def run(self, call: Call, slot_E: np.ndarray) -> np.ndarray:
        """Rows of a call whose blocks are in these slots."""
        holdings, programs, P = self._holdings, self._programs, len(call.block_P)
        x_TD, rank_P = call.x_TD, _ranks(call)
        if len(x_TD) < call.bucket:
            x_TD = np.zeros((call.bucket, x_TD.shape[1]), np.float32)
            x_TD[: len(call.x_TD)] = call.x_TD
        ids_TK = np.full((call.bucket, self._top_k), self._experts, np.int32)
        ids_TK[call.token_P, rank_P] = call.block_P
        slot_of, pairs = slot_E, programs.is_pairs(call.bucket)
        if pairs:
            slot_of = np.full(ids_TK.shape, holdings.nowhere, np.int32)
            slot_of[call.token_P, rank_P] = slot_E[call.block_P]
        with holdings.lock:
            rows = programs.rows(x_TD, ids_TK, holdings.array, slot_of)
        rows = np.asarray(rows)
        if call.bucket == 1:
            rows = rows[:P]
        elif pairs:
            rows = rows[call.token_P.astype(np.int64) * self._top_k + rank_P]
        else:
            rows = self._as_asked(rows[:P], call)
        self.computed += P
        return rows

    @staticmethod
    def _as_asked(rows_PD: np.ndarray, call: Call) -> np.ndarray:
        """Rows in order of block and token, which is how callers ask already."""
        key_P = call.block_P.astype(np.int64) * call.bucket + call.token_P
        if (np.diff(key_P) > 0).all():
            return rows_PD
        out_PD = np.empty_like(rows_PD)
        out_PD[np.argsort(key_P, kind="stable")] = rows_PD
        return out_PD

    def _read_and_compute(self, call: Call) -> np.ndarray | None:
        """One absent block after another, in a lent slot; the others together."""
        rows, slot_E = None, self._holdings.slot_LE[call.layer]
        away = slot_E[call.block_P] == self._holdings.nowhere
        parts = [(None, ~away)] if not away.all() else []
        parts += [(int(b), call.block_P == b) for b in np.unique(call.block_P[away])]
        for block, mine in parts:
            part = part_of(call, mine)
            if block is None:
                result = self.run(part, slot_E)
            else:
                result = self._read_one(part, block)
            if result is None:
                return None
            if rows is None:
                shape = len(call.block_P), result.shape[1]
                rows = np.zeros(shape, np.float32)
            rows[mine] = result
        return rows

    def _read_one(self, call: Call, block: int) -> np.ndarray | None:
        """Rows of a block that is read for them; None if no slot is free."""
        holdings = self._holdings
        slot = holdings.lend(holdings.blocks.read(call.layer, block))
        if slot is None:
            return None
        try:
            slot_E = np.full(self._experts, holdings.nowhere, np.int32)
            slot_E[block] = slot
            return self.run(call, slot_E)
        finally:
            holdings.give_back(slot)


def _ranks(call: Call) -> np.ndarray:
    """The r-th pair of a token takes its place r, whatever its rank was."""
    places_P = np.arange(len(call.block_P))
    if call.bucket == 1:
        return places_P
    order_P = np.argsort(call.token_P, kind="stable")
    token_P = call.token_P[order_P]
    rank_P = np.empty(len(token_P), np.int64)
    rank_P[order_P] = (
        places_P - np.searchsorted(token_P, np.arange(call.bucket))[token_P]
    )
    return rank_P


def part_of(call: Call, mine: np.ndarray) -> Call:
    """Some pairs of a call; a block's pairs stay together."""
    return dataclasses.replace(
        call, token_P=call.token_P[mine], block_P=call.block_P[mine]
    )

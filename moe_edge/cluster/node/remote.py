"""The caller's side: which pairs go where, sending them, and asking again.

One message a layer and server. A call that fails (its server is lost, or has not the
block any more) waits for the scheduler's next table and is made again as that says,
perhaps on this server itself. So a step ends with the same bits, whoever computed.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from moe_edge.cluster.node.answers import Answers, part_of
from moe_edge.cluster.node.ledger import Ledger
from moe_edge.cluster.node.tables import HERE, Tables, View
from moe_edge.cluster.transport.base import Call, PeerLost
from moe_edge.cluster.transport.messages.transport import Transport
from moe_edge.core.checks import MoeEdgeError


class LostBlocks(MoeEdgeError):
    """No table came that says who has the blocks of a call."""


class Part(NamedTuple):
    """What one server computes of a layer.

    Attributes:
      server: which.
      place_P: rows of the layer's pairs that it fills.
      token_T: tokens that it needs.
      token_P, block_P: its pairs, tokens counted within `token_T`.
    """

    server: int
    place_P: np.ndarray
    token_T: np.ndarray
    token_P: np.ndarray
    block_P: np.ndarray


def cut(ids_TK: np.ndarray, asked_E: np.ndarray, in_order: bool) -> list[Part]:
    """The pairs of other servers, server by server.

    Args:
      ids_TK: chosen blocks; E is none.
      asked_E: int [E + 1], whom to ask (`View.asked_LE`).
      in_order: rows are token by token, else in order of block and token
        (`ExpertWaves.rows`).
    """
    if len(ids_TK) == 1:
        return _cut_one(ids_TK[0], asked_E)
    K, block_P = ids_TK.shape[1], ids_TK.reshape(-1)
    order_P = np.arange(block_P.size)
    if not in_order:
        order_P = block_P.argsort(kind="stable")
        block_P = block_P[order_P]
    asked_P, parts = asked_E[block_P], []
    for server in np.unique(asked_P[asked_P != HERE]).tolist():
        place_P = np.flatnonzero(asked_P == server)
        token_T, token_P = np.unique(order_P[place_P] // K, return_inverse=True)
        parts.append(Part(server, place_P, token_T, token_P, block_P[place_P]))
    return parts


def _cut_one(ids_K: np.ndarray, asked_E: np.ndarray) -> list[Part]:
    """The same for one token, whose rows are in order of rank: every decode step's."""
    places: dict[int, list[int]] = {}
    for rank, server in enumerate(asked_E[ids_K].tolist()):
        if server != HERE:
            places.setdefault(server, []).append(rank)
    one_T, parts = np.zeros(1, np.int64), []
    for server, ranks in places.items():
        token_P = np.zeros(len(ranks), np.uint16)
        parts.append(Part(server, np.array(ranks), one_T, token_P, ids_K[ranks]))
    return parts


# A call is made again with so many times the deadline, so that a long one gets through;
# whoever has left this many unanswered hangs.
GROWTH, ATTEMPTS = 4, 4


def last_deadline_s(call_s: float) -> float:
    """Of a call's last attempt; so long the scheduler waits, too, when it then asks
    whoever has left all attempts unanswered.

    Args:
      call_s: deadline of the first attempt.
    """
    return call_s * GROWTH ** (ATTEMPTS - 1)


class Outgoing(NamedTuple):
    """A call on its way; the ticket is None where this server answers itself."""

    part: Part
    call: Call
    ticket: int | None
    sent_s: float


class Remote:
    """Asks other servers for the rows of a layer.

    Args:
      me: this server.
      first_peer: the transport's number of server 0; the others follow.
      deadline_s: of a call's first attempt; table_s: of waiting for a table after one
        failed, besides the time in which the scheduler judges (`last_deadline_s`).
      on_lost: is told (peer, kind) when a call found its server lost.
    """

    def __init__(
        self,
        me: int,
        transport: Transport,
        answers: Answers,
        tables: Tables,
        ledger: Ledger,
        *,
        first_peer: int = 0,
        deadline_s: float = 5.0,
        table_s: float = 30.0,
        on_lost: Callable[[int, str], None] | None = None,
    ):
        self.me, self.tables = me, tables
        self._first_peer = first_peer
        self._transport, self._answers, self._ledger = transport, answers, ledger
        self.deadline_s, self._table_s = deadline_s, table_s
        self._on_lost = on_lost

    def start(
        self,
        layer: int,
        view: View,
        parts: Sequence[Part],
        bucket: int,
        hidden_TD: np.ndarray,
    ) -> list[Outgoing]:
        """Sends the calls of a layer.

        Args:
          bucket: tokens of the layer's step, padding included.
          hidden_TD: hidden states of all of them.
        """
        outgoing = []
        for part in parts:
            call = Call(
                layer=layer,
                bucket=bucket,
                version=view.version,
                x_TD=hidden_TD[part.token_T],
                token_P=part.token_P.astype(np.uint16, copy=False),
                block_P=part.block_P.astype(np.uint16),
            )
            outgoing.append(self._send(part, call))
        return outgoing

    def _send(self, part: Part, call: Call) -> Outgoing:
        sent_s, ticket = time.perf_counter(), None
        if part.server != self.me:
            try:
                ticket = self._transport.start(self._first_peer + part.server, call)
            except PeerLost as error:
                self._lost(error)
                ticket = -1  # asked again in `finish`
        return Outgoing(part, call, ticket, sent_s)

    def finish(self, outgoing: Sequence[Outgoing], out_PD: np.ndarray) -> None:
        """Waits for all rows and writes them to their places.

        Args:
          out_PD: rows of pairs.
        Raises:
          LostBlocks: nobody computes a part, and no table came that says who does.
        """
        failed = []
        for each in outgoing:
            rows = self._rows(each)
            if rows is None:
                failed.append(each)
            else:
                out_PD[each.part.place_P] = rows
        for each in failed:
            self._ask_again(each.part, each.call, out_PD)

    def _rows(self, each: Outgoing, attempt: int = 0) -> np.ndarray | None:
        call, server = each.call, each.part.server
        if each.ticket is None:
            return self._answers.compute(call, on_demand=True)
        if each.ticket < 0:
            return None
        try:
            deadline_s = self.deadline_s * GROWTH**attempt
            (answer,) = self._transport.finish([each.ticket], deadline_s)
        except PeerLost as error:
            self._lost(error, attempt)
            return None
        if answer.rows is not None:
            times_s = each.sent_s, answer.at_s
            self._ledger.called(server, call, answer.rows, *times_s)
        return answer.rows

    def _lost(self, error: PeerLost, attempt: int = 0) -> None:
        kind = error.kind
        if kind == "overdue" and attempt + 1 >= ATTEMPTS:
            kind = "unanswered"
        if self._on_lost is not None:
            self._on_lost(error.peer, kind)

    def _ask_again(self, part, call: Call, out_PD: np.ndarray, attempt=1) -> None:
        version = call.version
        while True:
            wait_s = self._table_s + last_deadline_s(self.deadline_s)
            view = self.tables.newer(version, wait_s)
            if view is None:
                raise LostBlocks(
                    f"server {part.server} did not compute blocks of layer "
                    f"{call.layer}, and no table above version {version} came within "
                    f"{wait_s:g} s; is the scheduler there?"
                )
            version, left = view.version, []
            target_P = view.target_LE[call.layer][part.block_P]
            for server in np.unique(target_P).tolist():
                mine = target_P == server
                again = dataclasses.replace(part_of(call, mine), version=version)
                where = part.place_P[mine], part.token_T
                some = Part(server, *where, again.token_P, again.block_P)
                rows = self._rows(self._send(some, again), attempt)
                if rows is None:
                    left.append((some, again))
                else:
                    out_PD[some.place_P] = rows
            attempt = min(attempt + 1, ATTEMPTS - 1)
            if not left:
                return
            if len(left) > 1:
                for some, again in left[1:]:
                    self._ask_again(some, again, out_PD, attempt)
            part, call = left[0]

"""The loop of a cluster whose servers run their requests in turns, as ours do.

A step is one token of every running request, one request after another, and a prompt
passes the layers in chunks. `loop.ClusterLoop` runs all requests of a step together.
"""

from collections import deque
from typing import NamedTuple

from moe_edge.simulate.cluster.loop import ClusterLoop
from moe_edge.simulate.cluster.running import Running


class CallDone(NamedTuple):
    """A call to another server.

    Attributes:
      sent_s, end_s: when its layer's calls began and its answer was there.
      request, layer, server: of whom; the one that answered.
      pairs: (token, block) pairs in it.
      num_bytes: there and back.
      compute_s: of it the computation.
      decode: whether it was of a token that was fed back.
    """

    sent_s: float
    end_s: float
    request: int
    layer: int
    server: int
    pairs: int
    num_bytes: int
    compute_s: float
    decode: bool


class TurnLoop(ClusterLoop):
    """One run; arguments as `ClusterLoop`, and

    Args:
      chunk_tokens: of a prompt, that pass the layers together.

    Attributes:
      calls_done: every call to another server.
    """

    def __init__(self, *args, chunk_tokens: int, **kwargs):
        super().__init__(*args, **kwargs)
        self._chunk = chunk_tokens
        self._turns: list[deque[Running]] = [deque() for _ in self.servers]
        self._ended: list[list[Running]] = [[] for _ in self.servers]
        self._unread = [request.input_tokens for request in self.requests]
        self.calls_done: list[CallDone] = []
        self.on_call = self._note_call

    def _begin_step(self, time_s: float, server: int) -> None:
        running = self._admitted(time_s, server)
        if running:
            self._turns[server].extend(running)
            self._begin_pass(time_s, server)

    def _begin_pass(self, time_s: float, server: int) -> None:
        """The first request in turn: a chunk of its prompt, or its next token."""
        one = self._turns[server][0]
        domain, tokens = self.requests[one.id].domain, 1
        if one.fresh:
            tokens = min(self._chunk, self._unread[one.id])
            self._unread[one.id] -= tokens
        if one.fresh or len(self.schedule.lanes[server].running) > 1:
            cells = self.pools.cells(domain, one.row, tokens)
            calls = self._planner.plan(server, self.table.target_NX[server], cells)
        else:
            where = (server, self.table, one.id, domain, one.row, one.left)
            calls = self._planner.next_token(*where)
        one.row += tokens
        self._enter(time_s, server, calls, tokens)
        if one.fresh and self._unread[one.id]:
            self.servers[server].head_s = 0.0  # more of the prompt comes first

    def _end_step(self, time_s: float, server: int, _: int) -> None:
        """A pass is over."""
        turns, ended = self._turns[server], self._ended[server]
        one = turns[0]
        if not (one.fresh and self._unread[one.id]):
            turns.popleft()
            if self._new_token(time_s, server, one):
                ended.append(one)
        if turns:
            self._begin_pass(time_s, server)
            return
        self.schedule.end_step(server, time_s, ended)
        ended.clear()
        self._begin_step(time_s, server)

    def _note_call(self, server: int, item: int, end_s: float) -> None:
        state, one = self.servers[server], self._turns[server][0]
        calls = state.calls
        self.calls_done.append(
            CallDone(
                sent_s=state.sent_s,
                end_s=end_s,
                request=one.id,
                layer=state.layer,
                server=self.server_of[calls.gpu[item]],
                pairs=calls.pairs[item],
                num_bytes=calls.there[item] + calls.back[item],
                compute_s=calls.seconds[item],
                decode=not one.fresh,
            )
        )

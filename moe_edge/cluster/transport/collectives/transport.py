"""The transport `jax`: calls by `ppermute` between two processes, blocks by pulls.

An alternative to `messages`, on top of it: control stays there, lost peers are
noticed there, and a call is announced there, because both processes must run the same
program at the same time. The programs move the frames of `wire.py`, padded to a few
sizes. A program with a collective blocks its thread, for ever if the other process is
stopped; so each direction of each pair has a thread at both ends
(`lane.py`). A stuck one is left behind: end the process by `os._exit`.

JAX's ports have no authentication: whoever reaches them can read blocks and disturb
calls. Blocks do not go by pieces, so a call may stand behind one on a slow link.
"""

import concurrent.futures
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import jax
import numpy as np

from moe_edge.cluster.transport import wire
from moe_edge.cluster.transport.base import (
    Address,
    Answered,
    Call,
    Handlers,
    PeerLost,
    Refused,
    Transport,
)
from moe_edge.cluster.transport.collectives.blocks import Pulls, first_line
from moe_edge.cluster.transport.collectives.lane import Lane, padded
from moe_edge.cluster.transport.wire import Kind
from moe_edge.core.checks import ConfigError, MoeEdgeError

CALL, BLOCK = "jax_call", "jax_block"  # control messages of this transport
MAX_BYTES = 1 << 30  # of a frame that is announced
MAX_OPEN = 4096  # tickets not yet collected


class CollectivesTransport(Transport):
    """`Transport` by JAX, after `join_jax`.

    A peer's number is its process index. A process that is lost cannot come back under
    its number: its cliques are broken.

    Args:
      messages: carries control; its `on_lost` is set, and it is closed with this.
    Raises:
      ConfigError: this process has another index than number.
    """

    reconnects = False

    def __init__(self, messages: Transport):
        if jax.process_index() != messages.peer:
            raise ConfigError(
                f"peer {messages.peer} is process {jax.process_index()} of "
                "jax.distributed, expected the same number"
            )
        self.peer, self.address = messages.peer, messages.address
        self.traffic = messages.traffic
        self._messages = messages
        messages.on_lost = self._lose
        device = jax.local_devices(backend="cpu")[0]
        self._pulls = Pulls(messages.address.host, device)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # of what follows
        self._lanes: dict[tuple[int, int], Lane] = {}  # (caller, callee)
        self._open: dict[int, tuple[int, Future]] = {}  # ticket -> peer, answer
        self._lost: dict[int, Callable[[], PeerLost]] = {}

    def answering(self, handlers: Handlers) -> Handlers:
        """What `messages` is to answer with, where it serves already."""
        return _Answering(self, handlers)

    def serve(self, handlers: Handlers) -> None:
        self._messages.serve(self.answering(handlers))

    def connect(self, peer: int, address: Address) -> None:
        self.disconnect(peer)
        self._messages.connect(peer, address)
        with self._lock:
            self._lost.pop(peer, None)

    def disconnect(self, peer: int) -> None:
        self._messages.disconnect(peer)
        self._give_up(peer, lambda: PeerLost(peer, "dead", "was disconnected"))

    def reach(self, peer: int, deadline_s: float) -> bool:
        return peer not in self._lost  # its cliques are broken for good

    def start(self, peer: int, call: Call) -> int:
        self._check(peer)
        number, future = next(self._numbers), Future()
        frame = wire.encode_call(number, call)
        rows = len(call.token_P if call.weight_P is None else call.x_TD)
        answer_bytes = wire.ROWS_START + 4 * rows * call.x_TD.shape[1]
        sizes = padded(len(frame)), padded(answer_bytes)
        with self._lock:
            self._open[number] = peer, future
            if len(self._open) > MAX_OPEN:
                del self._open[next(iter(self._open))]
        lane = self.lane(self.peer, peer)
        lane.submit(lambda: self._ask(lane, peer, frame, sizes, future))
        return number

    def finish(self, tickets: Sequence[int], deadline_s: float) -> list[Answered]:
        asked = {ticket: self._open[ticket] for ticket in tickets}
        futures = [future for _, future in asked.values()]
        when = concurrent.futures.FIRST_EXCEPTION
        done, _ = concurrent.futures.wait(futures, deadline_s, when)
        for ticket, (_, future) in asked.items():
            if future in done and (error := future.exception()) is not None:
                del self._open[ticket]
                raise error
        for ticket, (peer, future) in asked.items():
            if future not in done:
                del self._open[ticket]
                raise PeerLost(peer, "overdue")
        for ticket in tickets:
            del self._open[ticket]
        return [future.result() for future in futures]

    def fetch(
        self, peer: int, layer: int, block: int, out: np.ndarray, deadline_s: float
    ) -> bool:
        until_s = time.monotonic() + deadline_s
        fields = {"layer": layer, "block": block}
        offer, _ = self._messages.control(peer, BLOCK, fields, deadline_s=deadline_s)
        if not offer:
            return False
        self._pulls.pull(peer, offer, out, until_s, lambda: self._check(peer))
        self.traffic.add_received(peer, Kind.RECORD, out.nbytes)
        return True

    def control(self, *question, **more):
        return self._messages.control(*question, **more)

    def post(self, *told, **more) -> None:
        self._messages.post(*told, **more)

    def close(self) -> None:
        self._messages.close()
        with self._lock:
            waiting = {peer for peer, _ in self._open.values()}
            lanes = list(self._lanes.values())
        for peer in waiting:
            self.disconnect(peer)
        for lane in lanes:
            lane.stop()

    def lane(self, caller: int, callee: int) -> Lane:
        """The lane of two processes, one of which is this."""
        with self._lock:
            lane = self._lanes.get((caller, callee))
            if lane is None:
                lane = self._lanes[caller, callee] = Lane(caller, callee)
            return lane

    def offer(self, peer: int, record: np.ndarray) -> dict:
        """Fields by which a peer may pull a record."""
        self.traffic.add_sent(peer, Kind.RECORD, record.nbytes)
        return self._pulls.offer(record)

    def _ask(self, lane, peer: int, frame: bytes, sizes, future: Future) -> None:
        """A call, in the lane's thread."""
        if future.done():
            return  # the peer was lost before its turn came
        try:
            self._messages.post(peer, CALL, {"sizes": sizes})
            self.traffic.add_sent(peer, Kind.CALL, sizes[0])
            lane.carry(frame, sizes[0], up=True)
            answer = lane.carry(None, sizes[1], up=False)
            self.traffic.add_received(peer, Kind.ROWS, sizes[1])
            kind, _, _ = wire.read_prefix(answer)
            if kind == Kind.ON_ERROR:
                _settle(future, Refused(peer, wire.decode_text(answer)))
            else:
                rows = wire.decode_rows(answer) if kind == Kind.ROWS else None
                _settle(future, Answered(rows, time.perf_counter()))
        except Exception as error:  # of the collective, or a malformed answer
            text = f"broke off a call: {first_line(error)}"
            if self._give_up(peer, lambda: PeerLost(peer, "dead", text)):
                self._report(peer, "dead")

    def _check(self, peer: int) -> None:
        lost = self._lost.get(peer)
        if lost is not None:
            raise lost()

    def _lose(self, peer: int, kind: str) -> None:
        if self._give_up(peer, lambda: PeerLost(peer, kind)):
            self._report(peer, kind)

    def _report(self, peer: int, kind: str) -> None:
        if self.on_lost is not None:
            self.on_lost(peer, kind)

    def _give_up(self, peer: int, make: Callable[[], PeerLost]) -> bool:
        """Fails what waits for a peer; False if it was given up before."""
        with self._lock:
            if peer in self._lost:
                return False
            self._lost[peer] = make
            waiting = [future for p, future in self._open.values() if p == peer]
        for future in waiting:
            _settle(future, make())
        return True


class _Answering:
    """Handlers of `messages`: this transport's announcements, and all others."""

    def __init__(self, transport: CollectivesTransport, handlers: Handlers):
        self._transport, self._handlers = transport, handlers
        self._one = threading.Lock()  # calls and control come one at a time

    def call(self, peer: int, call: Call) -> np.ndarray | None:
        with self._one:
            return self._handlers.call(peer, call)

    def block(self, layer: int, block: int) -> np.ndarray | None:
        return self._handlers.block(layer, block)

    def control(self, peer: int, name: str, fields: dict, arrays: dict):
        if name == CALL:
            sizes = fields["sizes"]
            if not all(4 < size == padded(size - 4) <= MAX_BYTES for size in sizes):
                raise ConfigError(f"process {peer} announces a call of {sizes} bytes")
            lane = self._transport.lane(peer, self._transport.peer)
            lane.submit(lambda: self._answer(lane, peer, sizes))
            return {}, {}
        if name == BLOCK:
            record = self._handlers.block(fields["layer"], fields["block"])
            return ({} if record is None else self._transport.offer(peer, record)), {}
        with self._one:
            return self._handlers.control(peer, name, fields, arrays)

    def _answer(self, lane: Lane, peer: int, sizes) -> None:
        """Answers a call, in the lane's thread."""
        traffic, number = self._transport.traffic, 0
        frame = lane.carry(None, sizes[0], up=True)
        traffic.add_received(peer, Kind.CALL, sizes[0])
        try:
            _, flags, number = wire.read_prefix(frame)
            rows = self.call(peer, wire.decode_call(frame, flags))
            answer = wire.prefix(Kind.NOT_HERE, number)
            if rows is not None:
                answer = wire.encode_rows(number, rows)
            if padded(len(answer)) > sizes[1]:
                size = f"{rows.shape[0]} x {rows.shape[1]}"
                raise ConfigError(f"{size} rows, expected at most {sizes[1]} bytes")
        except MoeEdgeError as error:
            answer = wire.encode_text(Kind.ON_ERROR, number, str(error))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            answer = wire.encode_text(Kind.ON_ERROR, number, text)
        traffic.add_sent(peer, Kind.ROWS, sizes[1])
        lane.carry(answer, sizes[1], up=False)
        if (after := getattr(self._handlers, "answered", None)) is not None:
            with self._one:
                after()


def _settle(future: Future, value) -> None:
    """Gives a future its value, or error, unless it has one."""
    is_error = isinstance(value, Exception)
    try:
        (future.set_exception if is_error else future.set_result)(value)
    except concurrent.futures.InvalidStateError:
        pass  # the peer was lost first

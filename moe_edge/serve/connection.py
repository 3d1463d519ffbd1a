"""A connection that does not wait for ever: uvicorn's, with limits on both directions.

uvicorn waits without end for a request line, for headers, for a body, and for a client
that does not read. Here each has a time; and where too many connections are open, the
one that has been idle longest gives way.
"""

import contextlib
import fcntl
import json
import socket
import sys
import termios
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from moe_edge.serve.errors import ApiError

MOST_CONNECTIONS = 512
MOST_EARLY_BYTES = 1 << 16  # of requests that come before an answer is written
# Of an answer that the kernel keeps for a client: it would take 4 MB of each, and who
# stops reading would be noticed only after that.
SEND_BUFFER_BYTES = 1 << 16


def limited(receive_s: float, idle_client_s: float) -> Callable[..., H11Protocol]:
    """What makes connections with these limits.

    Args:
      receive_s: from a request's first byte (or the connection's beginning) to the last
        of its body.
      idle_client_s: without a byte of an answer taken.
    """
    limits = {"receive_s": receive_s, "idle_client_s": idle_client_s}
    return type("Connection", (_Connection,), limits)


class _Connection(H11Protocol):
    receive_s: float
    idle_client_s: float

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._receiving = self._writing = None  # timers
        self._left = 0  # bytes to write, when last looked at

    def connection_made(self, transport) -> None:
        others = self.connections
        if len(others) >= MOST_CONNECTIONS:
            idle = [each for each in others if each.is_idle]
            if not idle:
                transport.abort()
                return
            min(idle, key=lambda each: each.since_s).transport.abort()
        super().connection_made(transport)
        self.since_s = self.loop.time()
        self._sock = transport.get_extra_info("socket")
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        # Any byte that the kernel does not take at once pauses whoever writes.
        transport.set_write_buffer_limits(high=0)
        self._watch_receiving()

    @property
    def is_idle(self) -> bool:
        """Whether no whole request waits for an answer."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._receiving, self._writing):
            if timer is not None:
                timer.cancel()
        self._receiving = self._writing = None
        if self.transport is not None:
            super().connection_lost(exc)

    # What comes in.

    def data_received(self, data: bytes) -> None:
        if self.transport is None:  # one too many
            return
        super().data_received(data)
        self._watch_receiving()

    def handle_events(self) -> None:
        """Goes on reading while an answer is made: that a client is gone comes last."""
        super().handle_events()
        if self.conn.their_state is h11.DONE:
            early = len(self.conn.trailing_data[0])
            if early > MOST_EARLY_BYTES:
                self.transport.abort()
            elif early:
                self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.since_s = self.loop.time()
        self._watch_receiving()

    def _watch_receiving(self) -> None:
        """Starts the time of a request that has begun, ends that of a whole one.

        Where uvicorn keeps no time between two requests (before the first, and after a
        body that was whole later than its answer), the next has begun.
        """
        state = self.conn.their_state
        is_kept = self.timeout_keep_alive_task is not None
        begun = state is h11.IDLE and (not is_kept or self.conn.trailing_data[0])
        if state is h11.SEND_BODY or begun:
            if self._receiving is None:
                after = self.receive_s, self._receive_timeout
                self._receiving = self.loop.call_later(*after)
        elif self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _receive_timeout(self) -> None:
        """An answer where something came and none was begun; then the end."""
        came = self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]
        if came:
            self._answer(
                ApiError(
                    "receive_timeout",
                    f"the request was not whole within {self.receive_s:g} s; send it "
                    "faster",
                )
            )
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what is no HTTP, in OpenAI's shape."""
        self._answer(ApiError("invalid_value", msg))
        self.transport.close()

    def _answer(self, error: ApiError) -> None:
        """Sends an error, if no answer was begun."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        body = json.dumps(error.body()).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        head = h11.Response(status_code=error.status, headers=[*headers.items()])
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))

    # What goes out. A closing connection, too, waits until all of it is written.

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writing is None:
            self._left = self._unsent_bytes()
            self._writing = self.loop.call_later(self.idle_client_s, self._look_writing)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _look_writing(self) -> None:
        """Ends a connection whose client took nothing; else looks again later."""
        left, self._writing = self._unsent_bytes(), None
        if left >= self._left:
            self.transport.abort()
        else:
            self.pause_writing()

    def _unsent_bytes(self) -> int:
        """Of an answer, what waits here and in the kernel.

        The kernel asks for more only when a third of its buffer is free, which takes a
        slow client longer than the limit.
        """
        waiting, sock = self.transport.get_write_buffer_size(), self._sock
        with contextlib.suppress(OSError):  # not every system counts a socket's bytes
            queued = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
            waiting += int.from_bytes(queued, sys.byteorder)
        return waiting

"""What joins the processes of a run: a connection from process 0 to each other one.

Over it they compare what they were started with, process 0 tells its decisions, and all
watch each other: who is gone or stands still ends the run. JAX notices that only in a
running collective, or after its own, longer heartbeat.
"""

import contextlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping

from moe_edge.core.checks import MoeEdgeError
from moe_edge.hosts import frames

BEAT_S = 1.0  # between two signs of life
LOST_S = 7.0  # without one a process counts as lost; less than JAX's heartbeat
GRACE_S = 2.0  # for a process to end by its own error when another one has ended by it


class HostLostError(MoeEdgeError):
    """Another process of the run has ended or stands still."""

    exit_code = 3


def end_process(line: str) -> None:
    """Prints a line and ends this process: its collectives may never return."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        print(f"error: {line}", file=sys.__stderr__, flush=True)
    os._exit(HostLostError.exit_code)


class _Peer:
    """The other end of one connection."""

    def __init__(self, number: int, sock: socket.socket):
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.number, self.sock = number, sock
        self.lock = threading.Lock()  # of what is sent
        self.inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.heard_s = time.monotonic()
        self.has_ended = False  # it said so
        self.is_gone = threading.Event()  # its end of the connection is closed

    def send(self, frame: bytes) -> None:
        """Sends; to one that is gone nothing: its reader says so."""
        with self.lock, contextlib.suppress(OSError):
            self.sock.sendall(frame)

    def send_now(self, frame: bytes) -> None:
        """Sends a short frame, unless that would wait: the peer reads nothing now."""
        if self.lock.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError):
                    self.sock.send(frame, socket.MSG_DONTWAIT)
            finally:
                self.lock.release()


class Link:
    """This process's connections: process 0 has one to each other, they one to it.

    Args:
      index: of this process; count: of all.
      socks: by number of the other process.
      on_lost: called once, by a thread, with a line that says who is lost.
      on_stop: called when another process asks for the end of the run.
      beat_s, lost_s: see BEAT_S, LOST_S.
    """

    def __init__(
        self,
        index: int,
        count: int,
        socks: Mapping[int, socket.socket],
        *,
        on_lost: Callable[[str], None] = end_process,
        on_stop: Callable[[], None] = lambda: None,
        beat_s: float = BEAT_S,
        lost_s: float = LOST_S,
    ):
        self.index, self.count = index, count
        self.on_stop = on_stop
        self._on_lost, self._beat_s, self._lost_s = on_lost, beat_s, lost_s
        self._peers = {number: _Peer(number, sock) for number, sock in socks.items()}
        self._closed = threading.Event()
        self._is_lost = threading.Lock()  # taken by the first who notices
        for peer in self._peers.values():
            self._start(self._read, peer)
        self._start(self._watch)

    def _start(self, target, *args) -> None:
        threading.Thread(target=target, args=args, name="hosts", daemon=True).start()

    # What programs tell each other.

    def broadcast(self, payload: bytes) -> None:
        """Process 0: the same message to all others."""
        frame = frames.pack(frames.DATA, payload)
        for peer in self._peers.values():
            peer.send(frame)

    def send(self, payload: bytes) -> None:
        """Another process: a message to process 0."""
        self._peers[0].send(frames.pack(frames.DATA, payload))

    def receive(self, number: int = 0) -> bytes:
        """The next message of a process; waits for it."""
        return self._peers[number].inbox.get()

    def gather(self) -> dict[int, bytes]:
        """Process 0: the next message of each other one, by its number."""
        return {number: self.receive(number) for number in self._peers}

    def ask_stop(self) -> None:
        """Asks process 0 to end the run in order."""
        self._peers[0].send(frames.pack(frames.STOP))

    # The end.

    def close(self, line: str | None = None) -> None:
        """This process leaves.

        Args:
          line: why, if not because the run is over; the others then end, too. Process
            0 gives them time for it: without its coordinator JAX would abort them.
        """
        self._closed.set()
        for peer in self._peers.values():
            peer.send_now(frames.pack_json(frames.END, line))
        if line is not None and self.index == 0:
            until_s = time.monotonic() + 2 * GRACE_S
            for peer in self._peers.values():
                peer.is_gone.wait(max(until_s - time.monotonic(), 0.0))

    def wait_lost(self) -> None:
        """Returns after some time: if another process is lost, this one ends before."""
        time.sleep(GRACE_S)

    def _lose(self, line: str) -> None:
        if self._closed.is_set() or not self._is_lost.acquire(blocking=False):
            return
        self._closed.set()
        for peer in self._peers.values():
            peer.send_now(frames.pack_json(frames.END, line))
        self._on_lost(line)

    def _lose_later(self, line: str) -> None:
        """Unless this process ends by itself: by the same error, most likely."""
        timer = threading.Timer(GRACE_S, self._lose, [line])
        timer.daemon = True
        timer.start()

    # Threads.

    def _read(self, peer: _Peer) -> None:
        try:
            while True:
                kind, payload = frames.read(peer.sock)
                peer.heard_s = time.monotonic()
                if kind == frames.DATA:
                    peer.inbox.put(payload)
                elif kind == frames.STOP:
                    self.on_stop()
                elif kind == frames.END:
                    peer.has_ended = True
                    if (line := frames.read_json(payload)) is not None:
                        self._lose_later(f"process {peer.number} has ended: {line}")
        except OSError:
            peer.is_gone.set()
            if not peer.has_ended:
                self._lose(
                    f"process {peer.number} has ended without a word: it was killed, "
                    "or its machine is gone; start all processes again"
                )

    def _watch(self) -> None:
        looked_s = time.monotonic()
        while not self._closed.wait(self._beat_s):
            now_s = time.monotonic()
            stood_still = now_s - looked_s > self._beat_s + self._lost_s / 2
            looked_s = now_s
            for peer in self._peers.values():
                peer.send_now(frames.pack(frames.BEAT))
                if stood_still:  # this process did, so it heard nobody
                    peer.heard_s = now_s
                if not peer.has_ended and now_s - peer.heard_s > self._lost_s:
                    self._lose(
                        f"process {peer.number} gave no sign of life for "
                        f"{self._lost_s:g} s: it was stopped, or its machine is gone; "
                        "start all processes again"
                    )

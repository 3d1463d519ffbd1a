"""An emulated one-way delay between a process's port and the thread that answers.

Each message is held for the delay from the moment it came, whatever the thread is busy
with, and each answer from the moment it was ready. Nothing holds anything else up.
Results made so say `emulated`.
"""

import threading
import time
from collections import deque

import zmq

IDLE_MS = 50  # how often it looks whether it is to end
STEP_S = 0.0002  # of the waits that ZeroMQ's whole milliseconds cannot make


class DelayLine(threading.Thread):
    """Carries messages between two sockets, which it closes at the end.

    Args:
      outside: the ROUTER.
      inside: a PAIR to the thread that answers.
    """

    def __init__(self, outside: zmq.Socket, inside: zmq.Socket, delay_s: float):
        super().__init__(name="moe_edge-delay", daemon=True)
        self._ways = (outside, inside, deque()), (inside, outside, deque())
        self._delay_s = delay_s
        self._stopping = False

    def stop(self) -> None:
        """Ends the thread; what it holds is sent on at once."""
        self._stopping = True

    def run(self) -> None:
        poller = zmq.Poller()
        for source, _, _ in self._ways:
            poller.register(source, zmq.POLLIN)
        while not self._stopping:
            due_s = [held[0][0] for _, _, held in self._ways if held]
            wait_s = min(due_s) - time.monotonic() if due_s else IDLE_MS / 1000
            if wait_s > 0.001:
                poller.poll(min(int(wait_s * 1000), IDLE_MS))
            elif wait_s > 0:
                time.sleep(min(wait_s, STEP_S))
            self._move(time.monotonic())
        self._move(float("inf"))
        for source, _, _ in self._ways:
            source.close()

    def _move(self, until_s: float) -> None:
        """Takes in what has come and passes on what is due."""
        for source, target, held in self._ways:
            while True:
                try:
                    parts = source.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                held.append((time.monotonic() + self._delay_s, parts))
            while held and held[0][0] <= until_s:
                target.send_multipart(held.popleft()[1])

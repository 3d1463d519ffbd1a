"""The other process of suite `cluster`: answers calls and fetches, echoes bare TCP.

    python -m moe_edge.studies.speed.cluster_peer

The first line of its standard input says what it is; it prints its address. Every line
after that orders blocks of another such process, and it prints the seconds of each. It
ends with its standard input.
"""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moe_edge.cluster.transport.base import Address
from moe_edge.cluster.transport.messages.transport import Transport
from moe_edge.core.checks import MoeEdgeError
from moe_edge.core.json_reader import parse_json

DEADLINE_S = 30.0


class Peer:
    """Starts such a process; a context manager.

    Attributes:
      address: of its transport.
      echo: (host, port) of bare TCP: connect, send two numbers of 4 bytes, then ask
        with the first number of bytes and get the second.

    Args:
      number: of its transport.
      checkpoint: a model; its first MoE layer's first blocks are held, as many as a
        token has.
      prefix: words before the command, as of a network namespace.
    """

    def __init__(
        self,
        number: int,
        checkpoint: Path | str,
        secret: str,
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
    ):
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.number = number
        what = {"number": number, "secret": secret, "host": host}
        found = self._ask(what | {"checkpoint": str(checkpoint)})
        self.address, self.echo = Address(**found["address"]), tuple(found["echo"])

    def _ask(self, order: dict) -> dict:
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise MoeEdgeError("the other process has ended; see what it printed")
        return parse_json("the other process's answer", line)

    def fetch(self, other: "Peer", layer: int, blocks: int, count: int) -> list[float]:
        """Seconds of each of `count` blocks of another process."""
        address = vars(other.address)
        order = {"number": other.number, "address": address, "layer": layer}
        return self._ask(order | {"blocks": blocks, "count": count})["seconds"]

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.communicate()


class Computing:
    """Answers calls and fetches from slots, and keeps how long it computed."""

    def __init__(self, checkpoint: str):
        from moe_edge.cluster.node.answers import Answers
        from moe_edge.cluster.node.holdings import BlockReader, Holdings
        from moe_edge.cluster.node.programs import PlacedPrograms
        from moe_edge.convert.open import open_checkpoint

        reader = open_checkpoint(checkpoint)
        config, blocks = reader.config, BlockReader(reader)
        held_LE = np.zeros((config.num_layers, config.moe.num_experts), bool)
        held_LE[config.moe_layers[0], : config.moe.top_k] = True
        self._holdings = Holdings(config.moe.top_k, held_LE.shape, blocks)
        self._holdings.fill(held_LE)
        self._answers = Answers(PlacedPrograms(config, blocks.dtype), self._holdings)
        self.record_size, self.dtype = blocks.record_size, blocks.dtype
        self._seconds: list[float] = []

    def call(self, peer, call):
        started_s = time.perf_counter()
        rows = self._answers.compute(call)
        self._seconds.append(time.perf_counter() - started_s)
        return rows

    def block(self, layer, block):
        return self._holdings.record(layer, block)

    def control(self, peer, name, fields, arrays):
        """Seconds of all calls since it was asked last."""
        seconds, self._seconds = np.array(self._seconds), []
        return {}, {"seconds": seconds}


def receive(connection: socket.socket, size: int) -> bool:
    """Takes in so many bytes; False if the connection ended."""
    while size:
        got = len(connection.recv(min(size, 1 << 16)))
        if not got:
            return False
        size -= got
    return True


def echo(server: socket.socket) -> None:
    """Serves one connection after another."""
    while True:
        connection, _ = server.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sizes = connection.recv(8, socket.MSG_WAITALL)
            ask, answer = np.frombuffer(sizes, np.uint32).tolist()
            data = bytes(answer)
            while receive(connection, ask):
                connection.sendall(data)


def main() -> None:
    """Serves until standard input ends."""
    what = parse_json("standard input", sys.stdin.readline())
    computing = Computing(what["checkpoint"])
    server = socket.create_server((what["host"], 0))
    threading.Thread(target=echo, args=(server,), daemon=True).start()
    secret = what["secret"].encode()
    with Transport(what["number"], secret, what["host"]) as transport:
        transport.serve(computing)
        told = {"address": vars(transport.address), "echo": server.getsockname()}
        print(json.dumps(told), flush=True)
        for line in sys.stdin:
            order = parse_json("standard input", line)
            transport.connect(order["number"], Address(**order["address"]))
            out_R = np.empty(computing.record_size, computing.dtype)
            seconds = []
            for block in np.arange(order["count"]) % order["blocks"]:
                where = order["number"], order["layer"], int(block), out_R
                started_s = time.perf_counter()
                if not transport.fetch(*where, DEADLINE_S):
                    raise MoeEdgeError(f"block {block} is not there")
                seconds.append(time.perf_counter() - started_s)
            transport.disconnect(order["number"])
            print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()

"""A process of a cluster without a model: `cluster_node.py PEER SECRET`.

Prints its address, and answers until its standard input ends. The layer of a call or
block says what it does: 0 = doubled rows, 1 = not here, 2 and 3 = take `version` ms
first; 2 holds Python's lock meanwhile, as a compiler may.
"""

import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]


def record(layer: int, block: int, size: int = 200_001) -> np.ndarray:
    """Bytes that differ between blocks."""
    return np.random.default_rng((layer, block)).integers(0, 256, size, np.uint8)


class Handlers:
    """What a process answers; `seen` keeps the control messages."""

    def __init__(self):
        self.seen = []

    def call(self, peer, call):
        if call.layer == 1:
            return None
        if call.layer == 2:
            ctypes.PyDLL(None).usleep(1000 * call.version)
        if call.layer == 3:
            time.sleep(call.version / 1000)
        return 2 * call.x_TD[call.token_P]

    def block(self, layer, block):
        return None if layer == 1 else record(layer, block)

    def control(self, peer, name, fields, arrays):
        self.seen.append((peer, name, fields))
        return {"peer": peer, "name": name, **fields}, arrays


class Node:
    """Starts such a process; a context manager."""

    def __init__(self, peer: int, secret: bytes):
        from moe_edge.cluster.transport.base import Address

        self.process = subprocess.Popen(
            [sys.executable, __file__, str(peer), secret.decode()],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        ready = json.loads(self.process.stdout.readline())
        self.jax_loaded = ready.pop("jax_loaded")
        self.address = Address(**ready)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


def main() -> None:
    """Serves until standard input ends."""
    from moe_edge.cluster.transport.messages.transport import Transport

    peer, secret = sys.argv[1:]
    with Transport(int(peer), secret.encode()) as transport:
        transport.serve(Handlers())
        loaded = {"jax_loaded": "jax" in sys.modules}
        print(json.dumps(vars(transport.address) | loaded), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()

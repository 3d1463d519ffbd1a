"""Processes of a cluster with JAX and no model: `collective_node.py INDEX COUNT ...`.

Process 0 tries the transport `jax` on the others and prints what came of it as JSON;
the last two are stopped and killed on the way.
"""

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
COUNT = 4
LIMIT_S = 90
SECRET = b"a secret of the tests"


def run_scenario(folder: Path) -> dict:
    """Starts the processes: what process 0 found."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(i), str(port), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(COUNT)
    ]
    try:
        output, _ = processes[0].communicate(timeout=LIMIT_S)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return json.loads(output.splitlines()[-1])


def main() -> None:
    """One of the processes."""
    me, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    from moe_edge.cluster.transport.messages.transport import MessagesTransport

    messages = MessagesTransport(me, SECRET)
    fact = {"pid": os.getpid(), **vars(messages.address)}
    (folder / f"{me}.new").write_text(json.dumps(fact))
    (folder / f"{me}.new").rename(folder / str(me))

    from moe_edge.cluster.transport.base import Address
    from moe_edge.cluster.transport.collectives.joining import join_jax

    join_jax(f"127.0.0.1:{port}", COUNT, me, LIMIT_S)

    from moe_edge.cluster.transport.collectives.transport import CollectivesTransport
    from moe_edge.core.checks import ConfigError
    from tests.support.cluster_node import Handlers

    transport = CollectivesTransport(messages)

    class Node(Handlers):
        def call(self, peer, call):
            if call.layer == 4:
                raise ConfigError("no layer 4")
            return super().call(peer, call)

        def control(self, peer, name, fields, arrays):
            if name == "call back":
                threading.Thread(target=call_back, daemon=True).start()
            return super().control(peer, name, fields, arrays)

    def call_back():
        right = [ask(transport, 0, value=float(i)) == 2.0 * i for i in range(40)]
        transport.post(0, "called back", {"right": all(right)})

    node = Node()
    transport.serve(node)
    facts = {}
    for peer in set(range(COUNT)) - {me}:
        while not (folder / str(peer)).exists():
            time.sleep(0.02)
        facts[peer] = json.loads((folder / str(peer)).read_text())
        pid = facts[peer].pop("pid")
        transport.connect(peer, Address(**facts[peer]))
        facts[peer] = pid
    if me:
        time.sleep(2 * LIMIT_S)
    found = drive(transport, node, facts)
    print(json.dumps(found), flush=True)
    os._exit(0)


def make_call(layer=0, value=1.0, version=0, tokens=2, width=3, partial=False):
    """A call whose rows are `2 * value`."""
    from moe_edge.cluster.transport.base import Call

    pairs = np.arange(2 * tokens) // 2
    return Call(
        layer,
        tokens,
        version,
        np.full((tokens, width), value, np.float32),
        pairs.astype(np.uint16),
        pairs.astype(np.uint16),
        np.ones(2 * tokens, np.float32) if partial else None,
    )


def ask(transport, peer, deadline_s=30.0, **kwargs):
    """One number that all rows of an answer hold; None: not here."""
    ticket = transport.start(peer, make_call(**kwargs))
    rows = transport.finish([ticket], deadline_s)[0].rows
    return None if rows is None else float(np.unique(rows).item())


def error_of(work) -> list[str]:
    """Kind and text of the error that something raises."""
    try:
        work()
    except Exception as error:
        return [type(error).__name__, getattr(error, "kind", ""), str(error)]
    return []


def await_entries(entries: list, count: int) -> None:
    """Until a list that others fill has so many entries, or it takes far too long."""
    until_s = time.monotonic() + 30
    while len(entries) < count and time.monotonic() < until_s:
        time.sleep(0.01)


def drive(transport, node, pids: dict[int, int]) -> dict:
    """Tries all that the transport does."""
    import jax

    from tests.support.cluster_node import record

    found, lost = {}, []
    transport.on_lost = lambda peer, kind: lost.append((peer, kind))
    found["rows"] = [ask(transport, peer, value=3.0) for peer in pids]
    found["many"] = [ask(transport, 1, value=float(i)) for i in range(20)]
    found["large"] = ask(transport, 1, value=5.0, tokens=64, width=512)
    found["not_here"] = ask(transport, 1, layer=1)
    found["refused"] = error_of(lambda: ask(transport, 1, layer=4))
    tickets = [transport.start(peer, make_call(value=float(peer))) for peer in pids]
    found["together"] = [
        float(each.rows[0, 0]) for each in transport.finish(tickets[::-1], 30.0)
    ]
    slow = lambda: ask(transport, 1, layer=3, version=500, deadline_s=0.1, value=9.0)  # noqa: E731
    found["overdue"] = error_of(slow)
    found["after_overdue"] = ask(transport, 1, value=1.0)

    out = np.zeros(200_001, np.uint8)
    found["fetched"] = [
        transport.fetch(peer, 0, peer, out, 30.0)
        and bool((out == record(0, peer)).all())
        for peer in pids
    ]
    found["block_not_here"] = transport.fetch(1, 1, 0, out, 30.0)
    small = np.zeros(7, np.uint8)
    found["other_size"] = error_of(lambda: transport.fetch(1, 0, 0, small, 30.0))

    for peer in pids:
        transport.post(peer, "call back")
    found["meanwhile"] = [ask(transport, 1 + i % 3, value=float(i)) for i in range(60)]
    await_entries(node.seen, len(pids))
    found["called_back"] = [fields["right"] for _, _, fields in node.seen]

    double = jax.jit(lambda x: 2 * x)
    double(1.0)
    os.kill(pids[3], signal.SIGSTOP)
    found["stopped"] = error_of(
        lambda: [ask(transport, 3, deadline_s=20) for _ in range(1000)]
    )
    found["others_then"] = [ask(transport, peer, value=4.0) for peer in (1, 2)]
    found["computes_then"] = float(double(4.0))
    ticket = transport.start(2, make_call(layer=3, version=5000))
    time.sleep(0.1)
    os.kill(pids[2], signal.SIGKILL)
    found["killed"] = error_of(lambda: transport.finish([ticket], 20.0))
    found["at_once"] = error_of(lambda: ask(transport, 2))
    found["fetch_then"] = error_of(lambda: transport.fetch(2, 0, 0, out, 20.0))
    found["others_last"] = ask(transport, 1, value=4.0)
    await_entries(lost, 2)
    found["lost"] = lost
    transport.disconnect(1)
    found["disconnected"] = error_of(lambda: ask(transport, 1))
    transport.close()
    return found


if __name__ == "__main__":
    main()

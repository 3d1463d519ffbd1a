"""Suite `cluster`: a decode call against bare TCP, a block against the line's rate."""

import contextlib
import functools
import secrets
import socket
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moe_edge.bench.rounds import interleave
from moe_edge.bench.speed import MS, Models, Rows, make_row
from moe_edge.cluster.network.namespaces import emulated_network
from moe_edge.cluster.transport.base import Call
from moe_edge.cluster.transport.messages.transport import Transport
from moe_edge.cluster.transport.wire import Kind
from moe_edge.convert.open import open_checkpoint
from moe_edge.studies.speed.cluster import ClusterSettings
from moe_edge.studies.speed.cluster_peer import DEADLINE_S, Peer, receive

LIMITS_MS = 0.35, 0.5  # at D = 192 and at 768
BLOCK_BAR = 1.3
PEER, ME = 1, 2


class CallRound(NamedTuple):
    """Medians of a round in ms, and a quantile."""

    over: float  # a call, less its computation and bare TCP
    over_p90: float
    tcp: float
    compute: float


class Caller:
    """Calls another process, and sends it as many bytes by bare TCP."""

    def __init__(self, peer: Peer, transport: Transport, config):
        self._transport, moe = transport, config.moe
        rng, K = np.random.default_rng(0), moe.top_k
        self._call = Call(
            layer=config.moe_layers[0],
            bucket=1,
            version=0,
            x_TD=rng.standard_normal((1, config.d_model), np.float32),
            token_P=np.zeros(K, np.uint16),
            block_P=np.arange(K, dtype=np.uint16),
        )
        transport.connect(PEER, peer.address)
        self.call()
        traffic = transport.traffic
        self.asked = traffic.sent()[PEER, int(Kind.CALL)].bytes
        self.answered = traffic.received()[PEER, int(Kind.ROWS)].bytes
        self._bare = socket.create_connection(peer.echo, timeout=DEADLINE_S)
        self._bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._bare.sendall(np.array([self.asked, self.answered], np.uint32).tobytes())

    def call(self) -> None:
        """A decode call of a token whose blocks are all there."""
        transport = self._transport
        transport.finish([transport.start(PEER, self._call)], DEADLINE_S)

    def bare(self) -> None:
        """The same bytes there and back."""
        self._bare.sendall(bytes(self.asked))
        receive(self._bare, self.answered)

    def round(self, count: int) -> CallRound:
        """So many calls, each followed by bare TCP."""
        ask = functools.partial(self._transport.control, PEER, "spent")
        ask()
        times_s = np.empty((count, 2))
        for both_s in times_s:
            for place, what in enumerate((self.call, self.bare)):
                started_s = time.perf_counter()
                what()
                both_s[place] = time.perf_counter() - started_s
        compute_s = ask()[1]["seconds"]
        tcp_s = np.median(times_s[:, 1])
        over_s = times_s[:, 0] - compute_s - tcp_s
        found = np.median(over_s), np.quantile(over_s, 0.9), tcp_s, np.median(compute_s)
        return CallRound(*(MS * float(seconds) for seconds in found))

    def close(self) -> None:
        self._bare.close()


def call_rows(settings: ClusterSettings, _work_dir: Path, models: Models) -> Rows:
    """A decode call to one server: median and p90 of what is no computation."""
    secret, callers, widths = secrets.token_hex(32), {}, {}
    with contextlib.ExitStack() as stack:
        for name, folder in models:
            peer = stack.enter_context(Peer(PEER, folder, secret))
            transport = stack.enter_context(Transport(ME, secret.encode()))
            config = open_checkpoint(folder).config
            callers[name] = Caller(peer, transport, config)
            stack.callback(callers[name].close)
            widths[name] = config.d_model
        cases = {
            name: functools.partial(caller.round, settings.calls)
            for name, caller in callers.items()
        }
        found = interleave(cases, settings.repeats)
    rows = []
    for (name, rounds), limit_ms in zip(found.items(), LIMITS_MS, strict=True):
        more = {
            "peer": [one.tcp for one in rounds],
            "peer_name": "bare TCP of the same bytes",
            "compute_ms": statistics.median(one.compute for one in rounds),
            "bytes": [callers[name].asked, callers[name].answered],
        }
        case, over_ms = f"call, D = {widths[name]}", [one.over for one in rounds]
        rows.append(make_row(f"{case}, median", over_ms, "ms", limit=limit_ms, **more))
        over_ms = [one.over_p90 for one in rounds]
        rows.append(make_row(f"{case}, p90", over_ms, "ms", **more))
    return rows


def block_rows(settings: ClusterSettings, _work_dir: Path, models: Models) -> Rows:
    """A block from one process to another one over an emulated line."""
    secret, mbps, rows = secrets.token_hex(32), settings.link_mbps, []
    with emulated_network(["one", "other"], mbps) as network:
        for name, folder in models:
            reader = open_checkpoint(folder)
            config = reader.config
            num_bytes = reader.layout.size * reader.dtype.itemsize
            with contextlib.ExitStack() as stack:
                here, there = (
                    stack.enter_context(
                        Peer(
                            *(number, folder, secret, network.address(node)),
                            network.command(node),
                        )
                    )
                    for number, node in ((ME, "one"), (PEER, "other"))
                )
                where = there, config.moe_layers[0], config.moe.top_k
                here.fetch(*where, settings.fetches)
                rounds = [
                    statistics.median(here.fetch(*where, settings.fetches))
                    for _ in range(settings.repeats)
                ]
            rows.append(
                make_row(
                    f"block of {name} at {mbps} Mbit/s",
                    [MS * seconds for seconds in rounds],
                    "ms",
                    peer=[MS * 8 * num_bytes / (mbps * 1e6)] * len(rounds),
                    peer_name="the line's rate",
                    bar=BLOCK_BAR,
                    bytes=num_bytes,
                    emulated=True,
                )
            )
    return rows

"""Servers of one tiny model in one process, joined by plain function calls."""

import functools
import time

import numpy as np

from moe_edge.cluster.node.answers import Answers
from moe_edge.cluster.node.engine import PlacedEngine
from moe_edge.cluster.node.holdings import BlockReader, Holdings
from moe_edge.cluster.node.home_programs import ServerHomes
from moe_edge.cluster.node.ledger import Ledger
from moe_edge.cluster.node.programs import PlacedPrograms
from moe_edge.cluster.node.remote import Remote
from moe_edge.cluster.node.tables import Tables
from moe_edge.cluster.transport.base import Answered, Call, PeerLost
from moe_edge.engine.weights import load_weights
from moe_edge.offload.store import device_dtype
from moe_edge.place.call_targets import call_targets
from tests.support.layered import BLOCKS, StoreReader
from tests.support.tiny_models import ALL


class DirectTransport:
    """Calls the answers of servers in the same process.

    Attributes:
      answers: server -> what it answers with.
      lost: servers that answer no more.
      calls: (server, call) of all that were made.
    """

    def __init__(self):
        self.answers: dict[int, Answers] = {}
        self.lost: set[int] = set()
        self.calls: list[tuple[int, Call]] = []

    def start(self, peer: int, call: Call) -> int:
        if peer in self.lost:
            raise PeerLost(peer, "dead")
        self.calls.append((peer, call))
        return len(self.calls) - 1

    def finish(self, tickets, deadline_s: float) -> list[Answered]:
        answers = []
        for ticket in tickets:
            peer, call = self.calls[ticket]
            if peer in self.lost:
                raise PeerLost(peer, "dead")
            rows = self.answers[peer].compute(call)
            answers.append(Answered(rows, time.perf_counter()))
        return answers


@functools.cache
def programs_of(name: str, dtype) -> PlacedPrograms:
    stored = StoreReader(ALL[name], dtype=dtype).dtype
    return PlacedPrograms(ALL[name], device_dtype(stored))


@functools.cache
def dense_weights(name: str, dtype):
    return load_weights(StoreReader(ALL[name], dtype=dtype), with_experts=False)


class Servers:
    """Some servers; `engines[n]` runs the requests of server n.

    Args:
      held_NLE: bool, what each holds.
      slots: of each server; None: enough for all blocks, one size for all tests.
      devices: homes of each server's blocks.
      route: of all engines.
    """

    def __init__(self, name, dtype, held_NLE, *, slots=None, devices=(), route=None):
        config, reader = ALL[name], StoreReader(ALL[name], dtype=dtype)
        weights, programs = dense_weights(name, dtype), programs_of(name, dtype)
        shape = config.num_layers, config.moe.num_experts
        self.transport, self.config, self.version = DirectTransport(), config, 0
        self.holdings, self.tables, self.engines = [], [], []
        for me, held_LE in enumerate(held_NLE):
            own_slots = BLOCKS + 1 if slots is None else slots[me]
            holdings = Holdings(own_slots, shape, BlockReader(reader), devices)
            if devices:
                given = config, programs.dtype, holdings.homes
                programs = ServerHomes(*given, devices)
            holdings.fill(held_LE)
            tables, ledger = Tables(me, holdings), Ledger(me, len(held_NLE), shape)
            answers = Answers(programs, holdings)
            self.transport.answers[me] = answers
            where = me, self.transport, answers, tables, ledger
            remote = Remote(*where, deadline_s=0.005, table_s=0.5)
            self.holdings.append(holdings)
            self.tables.append(tables)
            self.engines.append(
                PlacedEngine(weights, holdings, remote, ledger, programs, route)
            )
        self.place(held_NLE)

    def place(self, held_NLE: np.ndarray, install: bool = True) -> None:
        """A new table for blocks that are there already."""
        target_NLE, moe = np.zeros(held_NLE.shape, np.int16), self.config.moe_layers
        target_NLE[:, list(moe)] = call_targets(held_NLE[:, list(moe)])
        self.target(target_NLE, install)

    def target(self, target_NLE: np.ndarray, install: bool = True) -> None:
        """Gives all servers a new table."""
        self.version += 1
        for tables, target_LE in zip(self.tables, target_NLE, strict=True):
            tables.offer(self.version, target_LE)
            if install:
                tables.install()


def spread(config, num_servers: int, seed: int = 0, copies: float = 0.0) -> np.ndarray:
    """bool [N, L, E]: each block on a random server, and some on a second one."""
    rng = np.random.default_rng(seed)
    shape = config.num_layers, config.moe.num_experts
    owner_LE = rng.integers(num_servers, size=shape)
    held_NLE = owner_LE == np.arange(num_servers)[:, None, None]
    held_NLE |= rng.random(held_NLE.shape) < copies
    held_NLE[:, [i for i in range(shape[0]) if i not in config.moe_layers]] = False
    return held_NLE

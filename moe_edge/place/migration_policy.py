"""When and how a placement follows what is asked: counts in, a judged candidate out.

Pure, so that a simulator and a real scheduler decide alike: a `Ledger` keeps what was
counted, and each period `MigrationPolicy.propose` says which placement would suit it
and whether changing to it pays.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moe_edge.core.checks import (
    ConfigError,
    check_count,
    check_from_zero,
    check_known,
    check_positive,
)
from moe_edge.hardware.cost_model import CostModel
from moe_edge.place.migrate import (
    SOURCES,
    Decision,
    decide,
    remote_call_seconds,
    remote_seconds,
    settle,
)
from moe_edge.place.placer import Placer
from moe_edge.place.plan import Placement
from moe_edge.place.problem import Traffic


@dataclasses.dataclass(frozen=True)
class MigrationRule:
    """When placements change.

    Attributes:
      period_s: between two decisions on migration; Prism's is 5 minutes; 0 for none.
      keep: share of the statistics that stays after each period; 1 keeps all since
        the start, as Prism does (section IV-B), which reacts late to new data.
      source: where migrating blocks come from, host or network; Prism's eq. 3 counts
        host links, so its servers have every block in host memory.
      hysteresis: share of the cost that a migration must win on top.
    Raises:
      ConfigError: out of range or unknown.
    """

    period_s: float = 300.0
    keep: float = 1.0
    source: str = "host"
    hysteresis: float = 0.05

    def __post_init__(self):
        check_from_zero("migration period_s", self.period_s)
        check_known("source of blocks", self.source, SOURCES)
        if not 0 <= self.keep <= 1:
            raise ConfigError(f"keep must lie in [0, 1], got {self.keep}")
        if not 0 <= self.hysteresis < 1:
            raise ConfigError(
                f"hysteresis is {self.hysteresis}, expected 0 or more, below 1"
            )


class Ledger:
    """What servers asked for, older periods fading.

    Attributes:
      shape: servers, layers and blocks of a layer.
      pairs_NX: float64 [N, L * E], (token, block) pairs.
      calls_NX: likewise; steps in which a server asked for the block.
      seen_s: length of what was counted, faded alike.
    """

    def __init__(self, shape: tuple[int, int, int]):
        N, L, E = self.shape = shape
        self.pairs_NX = np.zeros((N, L * E))
        self.calls_NX = np.zeros((N, L * E))
        self.seen_s = 0.0

    @property
    def empty(self) -> bool:
        """Whether nobody asked for anything."""
        return not self.calls_NX.any()

    def count(self, server: int, cells: np.ndarray, counts: np.ndarray) -> None:
        """Takes note of one step's blocks (layer * E + block) and their pairs."""
        self.pairs_NX[server, cells] += counts
        self.calls_NX[server, cells] += 1

    def add(self, server: int, pairs_X: np.ndarray, calls_X: np.ndarray) -> None:
        """Takes note of what a server has counted itself since its last report."""
        self.pairs_NX[server] += pairs_X
        self.calls_NX[server] += calls_X

    def fade(self, keep: float) -> None:
        """A period is over: so much of all counts stays."""
        self.seen_s *= keep
        self.pairs_NX *= keep
        self.calls_NX *= keep


class Proposal(NamedTuple):
    """A candidate and what became of it.

    Attributes:
      candidate: settled: only blocks that are new to their server move.
      decision: whether to take it.
      calls_NLE: float64, calls of a period to come, as far as was counted.
    """

    candidate: Placement
    decision: Decision
    calls_NLE: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class MigrationPolicy(MigrationRule):
    """When and how placements change; its period is above 0.

    Attributes (more than those of `MigrationRule`):
      placer: finds candidates.
      chunk_bytes: of a block on the network, so that calls need not wait for all of it.
      traffic: what placers are told of requests.
    """

    placer: Placer
    chunk_bytes: int = 2**20
    traffic: Traffic = Traffic()

    def __post_init__(self):
        super().__post_init__()
        check_positive("migration period_s", self.period_s)
        check_count("chunk_bytes", self.chunk_bytes)

    def propose(
        self,
        ledger: Ledger,
        current: Placement,
        slots: Sequence[np.ndarray],
        cost_model: CostModel,
        seconds_NM: np.ndarray | None = None,
    ) -> Proposal:
        """The candidate of a period's end, and whether to take it.

        One pair of every block is added to what was counted, so that a server that
        nobody asked yet has statistics too.

        Args:
          ledger: with some calls, `seen_s` above 0.
          current: the placement in force.
          slots: of every server, blocks that a placement may use on each GPU.
          cost_model: what moving blocks costs, and calls unless they were measured.
          seconds_NM: measured or computed seconds of a call of a block from N to M;
            None: the cost model's, for as many tokens as calls had on average.
        """
        pairs_NLE = (ledger.pairs_NX + 1).reshape(ledger.shape)
        layers_pairs = pairs_NLE.sum(axis=(0, 2), keepdims=True)
        candidate = self.placer.place(
            pairs_NLE / layers_pairs,
            slots,
            cost_model,
            current=current,
            traffic=self.traffic,
        )
        candidate = settle(current, candidate, slots)
        scale = self.period_s / ledger.seen_s
        calls_NLE = (ledger.calls_NX * scale).reshape(ledger.shape)
        if seconds_NM is None:
            tokens = ledger.pairs_NX.sum() / max(ledger.calls_NX.sum(), 1.0)
            seconds_NM = remote_call_seconds(cost_model, max(1.0, tokens))
        decision = decide(
            current,
            candidate,
            lambda placement: remote_seconds(placement, calls_NLE, seconds_NM),
            cost_model,
            self.hysteresis,
            self.source,
        )
        return Proposal(candidate, decision, calls_NLE)

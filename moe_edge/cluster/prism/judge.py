"""When and how the placement of a run is judged: what servers counted, and the policy.

It asks servers for their counts at the end of each period and hands them to the
migration policy, which the simulator runs, too.
"""

import time

import numpy as np

from moe_edge.cluster.prism.port import Port
from moe_edge.cluster.scheduler.scheduler import SOON_S
from moe_edge.core.checks import CapacityError
from moe_edge.hardware.cost_model import CostModel
from moe_edge.place.migration_policy import Ledger, MigrationPolicy, Proposal
from moe_edge.place.plan import Placement


class Judge:
    """Counts of one method's run, and the decisions that come of them.

    Args:
      shape_NLE: servers, layers with experts, blocks.
      policy: None: nothing is ever judged.
      cost_model: for the policy.

    Attributes:
      decisions: of all periods.
    """

    def __init__(
        self,
        port: Port,
        shape_NLE: tuple[int, int, int],
        policy: MigrationPolicy | None,
        cost_model: CostModel | None,
    ):
        self._port, self._policy, self._cost_model = port, policy, cost_model
        self._ledger = Ledger(shape_NLE)
        self._counted: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._seconds_N2: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._begun_s = self._due_s = self._seen_s = 0.0
        self.decisions: list[dict] = []

    @property
    def calls_NLE(self) -> np.ndarray:
        """How often each server called a block, as far as was counted."""
        return self._ledger.calls_NX.reshape(self._ledger.shape)

    @property
    def source(self) -> str:
        """Where migrating blocks come from."""
        return self._policy.source

    def begin(self, begun_s: float) -> None:
        """The run begins."""
        self._begun_s = self._seen_s = begun_s
        if self._policy is not None:
            self._due_s = begun_s + self._policy.period_s

    def forget(self, server: int) -> None:
        """A server is lost; should it come back, it counts from nothing."""
        self._counted.pop(server, None)
        self._seconds_N2.pop(server, None)

    def is_due(self) -> bool:
        """Whether a period is over; the next one begins."""
        now_s = time.perf_counter()
        if self._policy is None or now_s < self._due_s:
            return False
        self._due_s = max(self._due_s + self._policy.period_s, now_s)
        return True

    def propose(self, held_NLE: np.ndarray, room_N: np.ndarray) -> Proposal | None:
        """The policy's candidate and decision; None: nothing to go by, or no room.

        Args:
          held_NLE: bool, the table in force.
          room_N: blocks that each server may hold.
        """
        self._count()
        now_s, ledger, proposal = time.perf_counter(), self._ledger, None
        ledger.seen_s += now_s - self._seen_s
        self._seen_s = now_s
        if not ledger.empty:
            current = Placement(np.where(held_NLE, 0, -1))
            room = [np.array([n]) for n in room_N.tolist()]
            where = ledger, current, room, self._cost_model, self.seconds_NM()
            try:
                proposal = self._policy.propose(*where)
            except CapacityError:  # after losses; what is held stays where it is
                return None
            noted = {"t_s": now_s - self._begun_s, **vars(proposal.decision)}
            self.decisions.append(noted)
        ledger.fade(self._policy.keep)
        return proposal

    def _count(self) -> None:
        """What servers have counted since the last time."""
        layers = self._port.moe_layers
        for server in self._port.alive:
            answer = self._port.ask(server, "counts", SOON_S)
            if answer is None:
                continue
            arrays = answer[1]
            now = tuple(
                arrays[name][layers].reshape(-1) for name in ("pairs_LE", "calls_LE")
            )
            before = self._counted.get(server, (0, 0))
            self._ledger.add(server, now[0] - before[0], now[1] - before[1])
            self._counted[server] = now
            self._seconds_N2[server] = arrays["call_s_N"], arrays["blocks_N"]

    def seconds_NM(self) -> np.ndarray | None:
        """Measured seconds of a block that another server computes; None: too few."""
        N = self._ledger.shape[0]
        call_s, blocks = np.zeros((N, N)), np.zeros((N, N))
        for server, (seconds_N, blocks_N) in self._seconds_N2.items():
            call_s[server], blocks[server] = seconds_N, blocks_N
        if not blocks.any():
            return None
        mean_s = call_s.sum() / blocks.sum()
        seconds = np.full((N, N), mean_s)
        np.divide(call_s, blocks, out=seconds, where=blocks > 0)
        np.fill_diagonal(seconds, 0.0)
        return seconds

"""One method's run: servers take a placement, requests are served, it may migrate."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from moe_edge.cluster.drills import Drill
from moe_edge.cluster.node.membership import Reception
from moe_edge.cluster.prism.judge import Judge
from moe_edge.cluster.prism.table_keeper import TableKeeper
from moe_edge.cluster.scheduler.requests import ClusterRequest
from moe_edge.cluster.scheduler.scheduler import Scheduler
from moe_edge.cluster.scheduler.serving import Holders, Serving, ServingResult
from moe_edge.cluster.transport.messages.transport import Transport
from moe_edge.hardware.cost_model import CostModel
from moe_edge.model.config import ModelConfig
from moe_edge.place.migration_policy import MigrationPolicy


@dataclasses.dataclass
class MethodRun(ServingResult):
    """What came of one method.

    Attributes:
      keeper: the table's history.
      decisions: on migration, of all periods.
      offsets_s: server -> its clock minus the scheduler's.
    """

    keeper: TableKeeper
    decisions: list[dict]
    offsets_s: dict[int, float]


class PrismScheduler(Scheduler):
    """Runs methods one after another over the same servers.

    Args:
      slots_N: blocks that each server may hold, its spare one among them.
      times_s: of `Scheduler`.

    Attributes:
      shape_LE: layers of the model and blocks of each; moe_layers: those with experts,
        which tables and placements count.
    """

    def __init__(
        self,
        transport: Transport,
        reception: Reception | None,
        config: ModelConfig,
        slots_N: Sequence[int],
        **times_s: float,
    ):
        super().__init__(transport, reception, len(slots_N), **times_s)
        self.slots_N = np.array(slots_N, np.int64)
        self.moe_layers = list(config.moe_layers)
        self.shape_LE = config.num_layers, config.moe.num_experts

    def run_method(
        self,
        held_NLE: np.ndarray,
        asked: Sequence[ClusterRequest],
        *,
        policy: MigrationPolicy | None = None,
        cost_model: CostModel | None = None,
        drill: Drill | None = None,
        ready_s: float = 120.0,
    ) -> MethodRun:
        """Serves requests from a placement on, which may follow what is asked.

        It begins with every server holding its blocks, and ends when every request has
        its last token or is lost, and nothing is on its way.
        """
        asked, judge = list(asked), Judge(self, held_NLE.shape, policy, cost_model)
        keeper = self.prepare(held_NLE, judge, ready_s)
        offsets_s = self.clock_offsets()
        serving = Serving(self, keeper, asked, drill)
        serving.run()
        came = asked, serving.failures, serving.begun_s, *self.notes()
        return MethodRun(*came, keeper, judge.decisions, offsets_s)

    def prepare(
        self, held_NLE: np.ndarray, judge: Judge, ready_s: float = 120.0
    ) -> TableKeeper:
        """All servers hold their blocks and know the first table."""
        self.lost_between.clear()  # the keeper looks who is there
        self.returning.restart()
        keeper, number = TableKeeper(self, held_NLE, judge), self.new_number()
        fields = {"version": 0, "number": number}
        for server, arrays in keeper.tables().items():
            held_LE = keeper.full(keeper.held_NLE[server])
            self.tell(server, "prepare", fields, {"held_LE": held_LE} | arrays)
        self.wait_for_all("ready", ready_s, number=number)
        return keeper

    def run_alone(
        self,
        asked: Sequence[ClusterRequest],
        *,
        passes_on: bool,
        drill: Drill | None = None,
        ready_s: float = 120.0,
    ) -> ServingResult:
        """Serves requests by servers that ask nobody.

        Args:
          passes_on: a busy server's new request goes to an idle one, if there is any.
        """
        asked = list(asked)
        self.lost_between.clear()
        self.returning.restart()
        number = self.new_number()
        self.tell_all("alone", {"number": number})
        self.wait_for_all("ready", ready_s, number=number)
        serving = Serving(self, Holders(), asked, drill, passes_on)
        serving.run()
        return ServingResult(asked, serving.failures, serving.begun_s, *self.notes())

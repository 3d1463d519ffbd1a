"""Where the requests and servers of a simulated cluster stand."""

from moe_edge.schedule.policy import Job
from moe_edge.simulate.cluster.calls import StepCalls
from moe_edge.workload.requests import Request


class Running(Job):
    """A request inside the cluster: where its routing is, how far it is."""

    __slots__ = ("fresh", "left", "row")

    def __init__(self, request: Request, row: int):
        super().__init__(request.id, request.server, request.arrival_s)
        self.row, self.left = row, request.output_tokens
        self.fresh = True  # in its first step


class ServerState:
    """The step that a server is in.

    Attributes:
      calls: of the step.
      dense_s: of the dense part of a layer; split_s: more, if others compute a part;
        head_s: after the last one.
      layer: the one it is in; pending: parts of it that are not there yet; end_s: when
        the last of the others was; sent_s: when calls began.
    """

    __slots__ = (
        *("calls", "dense_s", "split_s", "head_s"),
        *("layer", "pending", "end_s", "sent_s"),
    )

    def __init__(self):
        self.calls: StepCalls | None = None
        self.layer = self.pending = 0
        self.end_s = self.sent_s = self.dense_s = self.split_s = self.head_s = 0.0

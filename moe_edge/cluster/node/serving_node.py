"""A node that serves requests: a server of Prism's, or OD-MoE's main node."""

import time

from moe_edge.cluster.node.answers import Answers
from moe_edge.cluster.node.engine import PlacedEngine
from moe_edge.cluster.node.ledger import Ledger
from moe_edge.cluster.node.node import Node, Order
from moe_edge.cluster.node.requests import Requests, ServedRequest
from moe_edge.cluster.node.warm_up import warm_up
from moe_edge.cluster.transport.messages.transport import Transport
from moe_edge.engine.base import Engine


class ServingNode(Node):
    """A subclass makes the engine and what goes with it.

    Args:
      max_batch: requests that take turns.
    """

    engine: PlacedEngine
    answers: Answers
    ledger: Ledger

    def __init__(self, number: int, transport: Transport, max_batch: int = 1):
        super().__init__(number, transport)
        self._max_batch = max_batch
        self._requests: Requests | None = None
        self._compiled = 0

    def make_orders(self) -> dict[str, Order]:
        return super().make_orders() | {
            "warm": Order(later=self.warm),
            "request": Order(later=self._request),
        }

    @property
    def idle(self) -> bool:
        return self._requests is None or self._requests.idle

    def work(self) -> None:
        if not self.idle:
            self._requests.step()

    def warm(self, fields, arrays) -> None:
        """Compiles what requests of some sizes need."""
        sizes = arrays["sizes"].tolist()
        started_s = time.perf_counter()
        warm_up(self.engine, self.answers, sizes)
        self.rehearse(sizes)
        self.tell("warm", {"seconds": time.perf_counter() - started_s})

    def rehearse(self, sizes: list[tuple[int, int]]) -> None:
        """Compiles what else they need here."""

    def begin_run(self, number: int, engine: Engine | None = None) -> None:
        """A new run: what was noted is forgotten, and the scheduler told.

        Args:
          number: of the order to prepare for it.
          engine: instead of its own.
        """
        self.ledger.clear()
        self.engine.reset_records()
        self.transport.traffic.reset()
        self._requests = Requests(
            engine or self.engine,
            begin=self.begin_step,
            on_token=self.new_token,
            on_error=self.request_failed,
            max_batch=self._max_batch,
        )
        self._compiled = self.num_compiled()
        self.tell("ready", {"number": number})

    def num_compiled(self) -> int:
        return self.engine.num_compiled()

    @property
    def compiled(self) -> int:
        """Programs since the run began."""
        return self.num_compiled() - self._compiled

    def _request(self, fields, arrays) -> None:
        prompt, known = arrays["prompt"].tolist(), arrays["known"].tolist()
        new = fields["max_new_tokens"]
        self._requests.add(ServedRequest(fields["id"], prompt, new, known))

    def begin_step(self, request: int, is_decode: bool) -> None:
        self.ledger.token(request, is_decode)

    def new_token(self, number: int, token: int, done: bool, now_s: float) -> None:
        self.tell("token", {"id": number, "token": token, "done": done})

    def request_failed(self, number: int, line: str) -> None:
        """A request ended by its own error."""
        self.tell("failed", {"id": number, "error": line})

"""The main node: all of the model but its experts, which workers compute by call."""

import time
from collections.abc import Sequence

import numpy as np

from moe_edge.cluster.node.answers import Answers
from moe_edge.cluster.node.holdings import BlockReader, Holdings
from moe_edge.cluster.node.ledger import Ledger
from moe_edge.cluster.node.node import Order
from moe_edge.cluster.node.programs import PlacedPrograms
from moe_edge.cluster.node.remote import Remote
from moe_edge.cluster.node.serving_node import ServingNode
from moe_edge.cluster.roles import FIRST_WORKER, SHADOW
from moe_edge.cluster.transport.messages.transport import Transport
from moe_edge.engine.programs import count_compiled
from moe_edge.engine.sizes import capacity_for
from moe_edge.engine.weights import Weights
from moe_edge.papers.od_moe.cluster.groups import Groups, NoWorkers
from moe_edge.papers.od_moe.cluster.main_engine import (
    MainEngine,
    OdMoeTables,
    ShadowLink,
)
from moe_edge.papers.od_moe.shadow.predictor import Shadow


class MainNode(ServingNode):
    """The process of the main node."""

    def __init__(
        self,
        number: int,
        reader,
        weights: Weights,
        programs: PlacedPrograms,
        transport: Transport,
        groups: Groups,
        periods: Shadow,
        call_s: float = 30.0,
    ):
        super().__init__(number, transport)
        config = weights.config
        shape = config.num_layers, config.moe.num_experts
        self._groups, self._call_s = groups, call_s
        self._nothing = Holdings(0, shape, BlockReader(reader))
        # A worker that is left alone loads all blocks of a layer for one call.
        self._layer_bytes = self._nothing.blocks.block_bytes * shape[1]
        self._link = ShadowLink(transport, groups, periods)
        self.answers = Answers(programs, self._nothing)
        self.ledger = Ledger(groups.workers, groups.workers + 1, shape)
        self._remote = remote = Remote(
            groups.workers,
            transport,
            self.answers,
            OdMoeTables(groups, shape),
            self.ledger,
            first_peer=FIRST_WORKER,
            deadline_s=call_s,
            on_lost=self._worker_lost,
        )
        self.engine = MainEngine(
            weights, self._nothing, remote, self.ledger, programs, groups
        )
        self._began_s, self._decodes = 0.0, False
        self._step_s: list[float] = []

    def make_orders(self) -> dict[str, Order]:
        return super().make_orders() | {
            "predicted": Order(self._predicted, of_others=True),
            "said": Order(self._said, of_others=True),
            "prepare": Order(later=self._prepare),
            "notes": Order(self._notes),
        }

    def _predicted(self, fields, arrays) -> None:
        """What the shadow says of a layer."""
        self.engine.predicted.update(enumerate(fields["experts"], fields["first"]))

    def _said(self, fields, arrays) -> None:
        """The shadow has said all: this comes behind it."""

    def _worker_lost(self, peer: int, kind: str) -> None:
        """A call found a worker lost; others are asked from now on."""
        self.on_lost(peer, kind if kind == "dead" else "hung")

    def peer_suspected(self, peer: int) -> None:
        if peer == SHADOW:
            self._link.leave()
        else:
            self._groups.suspect(peer - FIRST_WORKER)

    def peer_found(self, peer: int) -> None:
        if peer == SHADOW:
            self._link.come_back()
        else:
            self._groups.find(peer - FIRST_WORKER)

    def peer_lost(self, peer: int) -> None:
        if peer == SHADOW:
            self._link.leave()
        else:
            self._groups.lose(peer - FIRST_WORKER)

    def rehearse(self, sizes) -> None:
        for capacity in {capacity_for(length + new) for length, new in sizes}:
            self._link.rehearse(self.engine.new_session(1, capacity))

    def _prepare(self, fields, arrays) -> None:
        """A new pass: with the shadow, or with all blocks at the workers."""
        self.engine.listener = self._link if fields["shadow"] else None
        self.engine.restart()
        rate = fields["bytes_per_s"]
        load_s = 0.0 if rate is None else self._layer_bytes / rate
        self._remote.deadline_s = self._call_s + load_s
        self._step_s.clear()
        self.begin_run(fields["number"])

    def num_compiled(self) -> int:
        return super().num_compiled() + count_compiled(self._link)

    def begin_step(self, request: int, is_decode: bool) -> None:
        super().begin_step(request, is_decode)
        self.engine.request = request
        self._began_s = time.perf_counter()
        self._decodes = is_decode

    def new_token(self, number: int, token: int, done: bool, now_s: float) -> None:
        if self._decodes:
            self._step_s.append(now_s - self._began_s)
        super().new_token(number, token, done, now_s)

    def request_failed(self, number: int, line: str) -> None:
        """By its own error, unless nobody is left to compute."""
        try:
            self._groups.left()
        except NoWorkers as error:
            self.fail(error)
        else:
            super().request_failed(number, line)

    def _notes(self, fields, arrays):
        """What this node has counted."""
        engine, layers = self.engine, len(self.engine.config.moe_layers)
        K = engine.config.moe.top_k
        steps, waits = np.array(self._step_s), np.array(engine.waits_s)
        known = min(len(steps), len(waits))
        own = steps[:known] - waits[:known]
        facts = {
            "t_main_s": float(own.mean() / layers) if known else None,
            "t_wait_s": float(waits[:known].mean() / layers) if known else None,
            "weight_bytes": engine.weights.num_bytes,
            "compiled": self.compiled,
        }
        rows = [
            (*where, *chosen, *_padded(engine.predicted.get(count, ()), K))
            for *where, count, chosen in engine.decoded
        ]
        arrays = {"decoded": np.array(rows, np.int32).reshape(-1, 3 + 2 * K)}
        return facts, arrays | {"calls": self.ledger.calls()}


def _padded(experts: Sequence[int], size: int) -> list[int]:
    return [*experts[:size], *[-1] * (size - len(experts))]

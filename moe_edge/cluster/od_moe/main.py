"""The main node: all of the model but its experts, which workers compute by call."""

import threading
import time
from collections.abc import Sequence

import numpy as np

from moe_edge.cluster.node.answers import Answers
from moe_edge.cluster.node.ledger import Ledger
from moe_edge.cluster.node.membership import compiled_is_kept
from moe_edge.cluster.node.programs import PlacedPrograms
from moe_edge.cluster.node.remote import Remote
from moe_edge.cluster.node.requests import Requests, ServedRequest
from moe_edge.cluster.node.warm_up import warm_up
from moe_edge.cluster.od_moe.groups import Groups, NoWorkers
from moe_edge.cluster.od_moe.main_engine import Asked, MainEngine, ShadowLink
from moe_edge.cluster.od_moe.node import Node
from moe_edge.cluster.od_moe.roles import FIRST_WORKER, SHADOW
from moe_edge.cluster.od_moe.worker_slots import WorkerSlots
from moe_edge.cluster.transport.base import Transport
from moe_edge.engine.programs import count_compiled
from moe_edge.engine.session import capacity_for
from moe_edge.engine.weights import Weights
from moe_edge.offload.slots import make_slots
from moe_edge.offload.store import device_dtype
from moe_edge.predict.shadow import Shadow


class MainNode(Node):
    """The process of the main node."""

    def __init__(
        self,
        number: int,
        reader,
        weights: Weights,
        transport: Transport,
        groups: Groups,
        periods: Shadow,
        call_s: float = 30.0,
        programs: PlacedPrograms | None = None,
    ):
        super().__init__(number, transport)
        config = weights.config
        shape = config.num_layers, config.moe.num_experts
        dtype = device_dtype(reader.dtype)
        programs = programs or PlacedPrograms(config, dtype)
        self._groups, self._call_s = groups, call_s
        # A worker that is left alone loads all blocks of a layer for one call.
        self._layer_bytes = reader.layout.size * dtype.itemsize * shape[1]
        self._link = ShadowLink(transport, groups, periods)
        self._nothing = _NoSlots(programs, reader)
        self._answers = Answers(programs, self._nothing)
        self.ledger = Ledger(groups.workers, groups.workers + 1, shape)
        self._remote = remote = Remote(
            groups.workers,
            transport,
            self._answers,
            Asked(groups, shape),
            self.ledger,
            first_peer=FIRST_WORKER,
            deadline_s=call_s,
            on_lost=self._call_failed,
        )
        self.engine = MainEngine(
            weights, self._nothing, remote, self.ledger, programs, groups
        )
        self._requests: Requests | None = None
        self._began_s, self._decodes = 0.0, False
        self._step_s: list[float] = []
        self._compiled = 0

    # In the transport's threads.

    def control(self, peer, name, fields, arrays):
        if name == "predicted":
            self.engine.predicted.update(enumerate(fields["experts"], fields["first"]))
            return {}, {}
        if name == "said":  # the shadow has said all: this comes behind it
            return {}, {}
        return super().control(peer, name, fields, arrays)

    def peer_lost(self, peer: int, kind: str) -> None:
        if peer == SHADOW:
            self._link.alive = False
        else:
            self._groups.lose(peer - FIRST_WORKER)
        self.tell("lost", {"who": peer - 1, "kind": kind})

    def _call_failed(self, worker: int, kind: str) -> None:
        """A worker is lost; in the engine's thread."""
        self.peer_lost(FIRST_WORKER + worker, kind)

    # Orders.

    @property
    def idle(self) -> bool:
        return self._requests is None or self._requests.idle

    def work(self) -> None:
        if not self.idle:
            self._requests.step()

    def do_warm(self, fields, arrays) -> None:
        sizes = arrays["sizes"].tolist()
        with compiled_is_kept():
            seconds = warm_up(self.engine, self._answers, sizes)
            for capacity in {capacity_for(length + new) for length, new in sizes}:
                self._link.rehearse(self.engine.new_session(1, capacity))
        self.tell("warm", {"seconds": seconds})

    def do_prepare(self, fields, arrays) -> None:
        """A new pass: with the shadow, or with all blocks at the workers."""
        self.engine.listener = self._link if fields["shadow"] else None
        self.engine.restart()
        rate = fields["bytes_per_s"]
        load_s = 0.0 if rate is None else self._layer_bytes / rate
        self._remote.deadline_s = self._call_s + load_s
        self._step_s.clear()
        self.ledger.clear()
        self.transport.traffic.reset()
        self._requests = Requests(
            self.engine,
            begin=self._begin,
            on_token=self._new_token,
            on_error=self._failed,
        )
        self._compiled = self._num_compiled()
        self.tell("ready")

    def _num_compiled(self) -> int:
        return self.engine.num_compiled() + count_compiled(self._link)

    def do_request(self, fields, arrays) -> None:
        request = ServedRequest(
            fields["id"], arrays["prompt"].tolist(), fields["max_new_tokens"]
        )
        self._requests.add(request)

    def _begin(self, request: int, is_decode: bool) -> None:
        self.ledger.token(request, is_decode)
        self.engine.request = request
        self._began_s = time.perf_counter()
        self._decodes = is_decode

    def _new_token(self, number: int, token: int, done: bool, now_s: float) -> None:
        if self._decodes:
            self._step_s.append(now_s - self._began_s)
        self.tell("token", {"id": number, "token": token, "done": done})

    def _failed(self, number: int, line: str) -> None:
        """A request ended by its own error, unless nobody is left to compute."""
        try:
            self._groups.left()
        except NoWorkers as error:
            self.fail(error)
        else:
            self.tell("failed", {"id": number, "error": line})

    def do_notes(self, fields, arrays):
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
            "compiled": self._num_compiled() - self._compiled,
        }
        rows = [
            (*where, *chosen, *_padded(engine.predicted.get(count, ()), K))
            for *where, count, chosen in engine.decoded
        ]
        arrays = {"decoded": np.array(rows, np.int32).reshape(-1, 3 + 2 * K)}
        return facts, arrays | {"calls": self.ledger.calls()}


def _padded(experts: Sequence[int], size: int) -> list[int]:
    return [*experts[:size], *[-1] * (size - len(experts))]


class _NoSlots:
    """The main node's slots: none, but one for the shapes of programs."""

    def __init__(self, programs: PlacedPrograms, reader):
        dtype = device_dtype(reader.dtype)
        self._slots = make_slots(1, reader.layout.size, dtype)
        self.lock, self.nowhere = threading.RLock(), 1

    array = WorkerSlots.array

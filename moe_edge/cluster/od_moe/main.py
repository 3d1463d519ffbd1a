"""The main node: all of the model but its experts, which workers compute by call.

It is a server without blocks (`engine.PlacedEngine`). Whom it asks for a layer's
experts follows from the layer's count and from what the shadow predicted; results are
those of the model, whatever was predicted.
"""

import threading
import time

import jax
import numpy as np

from moe_edge.cluster.answers import Answers
from moe_edge.cluster.engine import PlacedEngine
from moe_edge.cluster.ledger import Ledger
from moe_edge.cluster.node import Node
from moe_edge.cluster.od_moe.groups import Groups
from moe_edge.cluster.od_moe.roles import FIRST_WORKER, SHADOW
from moe_edge.cluster.od_moe.worker import ATTEMPTS, WorkerSlots
from moe_edge.cluster.programs import PlacedPrograms
from moe_edge.cluster.remote import Remote
from moe_edge.cluster.requests import Requests, ServedRequest
from moe_edge.cluster.tables import HERE, View
from moe_edge.cluster.transport import Transport
from moe_edge.cluster.warm_up import warm_up
from moe_edge.core.checks import MoeEdgeError
from moe_edge.engine.programs import jit_step
from moe_edge.engine.session import Session
from moe_edge.engine.shadow import read_kv
from moe_edge.engine.weights import Weights
from moe_edge.predict.shadow import Shadow


class NoWorkers(MoeEdgeError):
    """All workers are lost."""

    exit_code = 3


class Asked:
    """Whom to ask, layer by layer; takes the place of `tables.Tables`."""

    def __init__(self, groups: Groups, shape_LE: tuple[int, int]):
        self.groups, self._shape = groups, shape_LE
        L, E = shape_LE
        self._rows = np.full((L, E + 1), HERE, np.int16)
        self._none_LE = np.zeros((L, E + 1), np.int32)
        self._none_L = np.zeros(L, bool)
        self.view = self.view_of(0)

    def view_of(self, version: int, layer: int | None = None, row_E=None) -> View:
        """A view in which a layer's experts are computed by these workers."""
        asked_LE = self._rows
        if layer is not None:
            asked_LE = self._rows.copy()
            asked_LE[layer, :-1] = row_E
        return View(version, asked_LE, asked_LE, self._none_LE, self._none_L)

    def newer(self, version: int, deadline_s: float) -> View | None:
        """After a worker was lost: any other one may load what it was asked for."""
        if not self.groups.alive:
            raise NoWorkers("all workers are lost; nothing can go on")
        if version % ATTEMPTS == ATTEMPTS - 1:
            return None
        spread_E = self.groups.spread(self._shape[1])
        asked_LE = np.tile(
            np.append(spread_E, HERE).astype(np.int16), (self._shape[0], 1)
        )
        return View(version + 1, asked_LE, asked_LE, self._none_LE, self._none_L)


class MainEngine(PlacedEngine):
    """Runs a model whose experts are loaded on demand by workers.

    Attributes:
      predicted: (step, layer) -> experts, best first, as they come from the shadow.
      steps_s, waits_s: of decode steps: their time, and waiting for workers in it.
      steps: decode steps so far, of all texts.
    """

    def __init__(self, weights, holdings, remote, ledger, programs, groups: Groups):
        super().__init__(weights, holdings, remote, ledger, programs)
        self._groups, self._asked = groups, remote.tables
        moe_layers = self.config.moe_layers
        self._place = {layer: place for place, layer in enumerate(moe_layers)}
        self.listener: ShadowLink | None = None
        self.steps = self.steps_before = 0
        self.predicted: dict[tuple[int, int], list[int]] = {}
        self.waits_s: list[float] = []
        self._decodes = False

    def _begin_prompts(self, session: Session, prompts) -> None:
        self._view, self._decodes = self._asked.view, False
        self.steps_before = self.steps
        self.predicted.clear()
        if self.listener is not None:
            self.listener.begin(session, prompts, self.steps)

    def _begin_tokens(self, session: Session, tokens_B, active_B) -> None:
        self._view, self._decodes = self._asked.view, True
        self.steps += 1
        self.waits_s.append(0.0)
        if self.listener is not None:
            index = self.steps - self.steps_before
            self.listener.token(session, index, int(np.asarray(tokens_B)[0]))

    def count(self, layer: int) -> int:
        """Of a layer in the running step, through all texts."""
        return (self.steps - 1) * len(self._place) + self._place[layer]

    def _layer_view(self, layer: int, ids_TK: np.ndarray) -> View:
        E = self.config.moe.num_experts
        if not self._decodes:
            return self._asked.view_of(0, layer, self._groups.spread(E))
        count = self.count(layer)
        index = self.steps - self.steps_before
        predicted = self.predicted.get((index, layer), ())
        row_E = np.full(E, HERE, np.int16)
        where = self._groups.choose(count, ids_TK[0].tolist(), predicted)
        for expert, worker in where.items():
            row_E[expert] = worker
        if self.listener is not None:
            self.listener.passed(count, set(where.values()))
        return self._asked.view_of(count * ATTEMPTS, layer, row_E)

    def _gather(self, *arguments):
        started_s = time.perf_counter()
        rows = super()._gather(*arguments)
        if self._decodes:
            self.waits_s[-1] += time.perf_counter() - started_s
        return rows


class ShadowLink:
    """What the main node tells shadow and workers while it runs.

    Attributes:
      alive: whether the shadow is there.
    """

    def __init__(self, transport: Transport, groups: Groups, periods: Shadow):
        self._transport, self._groups, self._periods = transport, groups, periods
        self._read_kv = jit_step(read_kv, static_argnames="count")
        self.alive = True
        self._length = 0

    def begin(self, session: Session, prompts, steps_before: int) -> None:
        """A prompt is about to run."""
        self._length = len(prompts[0])
        fields = {"steps_before": steps_before, "capacity": session.capacity}
        arrays = {"prompt": np.array(prompts[0], np.int32)}
        self._post("begin", fields, arrays)

    def token(self, session: Session, index: int, token: int) -> None:
        """Decode step `index` (from 1) begins."""
        fields, arrays = {"index": index, "token": token}, {}
        if self._periods.aligns_kv(index):
            start, count = 0, session.capacity
            if index > 1:
                count = self._periods.kv_period
                start = self._length + index - 1 - count
            start_B = jax.device_put(np.array([start], np.int32))
            kv = self._read_kv(session.caches, start_B, count=count)
            kept = self._length if index == 1 else count
            for layer, cache in enumerate(kv):
                for name, array in cache.items():
                    arrays[f"{layer}.{name}"] = np.ascontiguousarray(
                        np.asarray(array)[:, :kept]
                    )
            fields["kv_start"] = start
        self._post("token", fields, arrays)

    def passed(self, count: int, asked: set[int]) -> None:
        """Workers of a layer's group that it does not ask may go on."""
        for worker in self._groups.members(count):
            if worker not in asked:
                self._transport.post(FIRST_WORKER + worker, "passed", {"count": count})

    def _post(self, name: str, fields: dict, arrays: dict) -> None:
        if self.alive:
            self._transport.post(SHADOW, name, fields, arrays)


class MainNode(Node):
    """The process of the main node."""

    def __init__(
        self,
        number: int,
        reader,
        weights: Weights,
        transport: Transport,
        groups: Groups,
        periods: Shadow | None,
        call_s: float = 30.0,
    ):
        super().__init__(number, transport)
        config = weights.config
        shape = config.num_layers, config.moe.num_experts
        from moe_edge.offload.store import device_dtype

        programs = PlacedPrograms(config, device_dtype(reader.dtype))
        self._groups, self._periods = groups, periods
        self._nothing = _NoSlots(programs, reader)
        self._answers = Answers(programs, self._nothing)
        self.ledger = Ledger(groups.workers, groups.workers + 1, shape)
        remote = Remote(
            groups.workers,
            transport,
            self._answers,
            Asked(groups, shape),
            self.ledger,
            first_peer=FIRST_WORKER,
            deadline_s=call_s,
            on_lost=self._worker_lost,
        )
        self.engine = MainEngine(
            weights, self._nothing, remote, self.ledger, programs, groups
        )
        self._requests: Requests | None = None
        self._predictions: list[tuple] = []
        self._lock = threading.Lock()
        self._began_s = 0.0
        self._step_s: list[float] = []
        self._compiled = 0

    # In the transport's threads.

    def control(self, peer, name, fields, arrays):
        if name == "predicted":
            index, layer = fields["index"], fields["layer"]
            self.engine.predicted[index, layer] = fields["experts"]
            return {}, {}
        return super().control(peer, name, fields, arrays)

    def peer_lost(self, peer: int, kind: str) -> None:
        if peer == SHADOW:
            if self.engine.listener is not None:
                self.engine.listener.alive = False
        else:
            self._worker_lost(peer - FIRST_WORKER, kind)
        self.tell("lost", {"who": peer - 1, "kind": kind})

    def _worker_lost(self, worker: int, kind: str) -> None:
        self._groups.alive.discard(worker)

    # Orders.

    @property
    def idle(self) -> bool:
        return self._requests is None or self._requests.idle

    def work(self) -> None:
        if not self.idle:
            self._requests.step()

    def do_warm(self, fields, arrays) -> None:
        from moe_edge.cluster.membership import compiled_is_kept

        with compiled_is_kept():
            sizes = arrays["sizes"].tolist()
            seconds = warm_up(self.engine, self._answers, sizes)
        self.tell("warm", {"seconds": seconds})

    def do_prepare(self, fields, arrays) -> None:
        """A new pass: with the shadow, or with all blocks at the workers."""
        listener = None
        if fields["shadow"] and self._periods is not None:
            listener = ShadowLink(self.transport, self._groups, self._periods)
        self.engine.listener = listener
        self.engine.waits_s.clear()
        self._step_s.clear()
        self.ledger.clear()
        self.transport.traffic.reset()
        self._predictions.clear()
        self._requests = Requests(
            self.engine,
            begin=self._begin,
            on_token=self._new_token,
            on_error=lambda number, line: self.tell(
                "failed", {"id": number, "error": line}
            ),
        )
        self._compiled = self.engine.num_compiled()
        self.tell("ready")

    def do_request(self, fields, arrays) -> None:
        request = ServedRequest(
            fields["id"], arrays["prompt"].tolist(), fields["max_new_tokens"]
        )
        self._requests.add(request)

    def _begin(self, request: int, is_decode: bool) -> None:
        self.ledger.token(request, is_decode)
        self._began_s = time.perf_counter()
        self._decodes = is_decode

    def _new_token(self, number: int, token: int, done: bool, now_s: float) -> None:
        engine = self.engine
        if self._decodes:
            self._step_s.append(now_s - self._began_s)
            index = engine.steps - engine.steps_before
            for layer in self.engine.config.moe_layers:
                found = engine.predicted.pop((index, layer), None)
                if found is not None:
                    self._predictions.append((number, index, layer, found))
        self.tell("token", {"id": number, "token": token, "done": done, "at_s": now_s})

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
            "compiled": engine.num_compiled() - self._compiled,
        }
        rows = [
            (n, i, layer, *_padded(ids, K)) for n, i, layer, ids in self._predictions
        ]
        arrays = {f"lookups_{k}": v for k, v in self.ledger.lookups().items()}
        arrays["predictions"] = np.array(rows, np.int32).reshape(-1, 3 + K)
        arrays["calls"] = self.ledger.calls()
        return facts, arrays


def _padded(experts: list[int], size: int) -> list[int]:
    return [*experts[:size], *[-1] * (size - len(experts))]


class _NoSlots:
    """The main node's slots: none, but one for the shapes of programs."""

    def __init__(self, programs: PlacedPrograms, reader):
        from moe_edge.offload.slots import make_slots
        from moe_edge.offload.store import device_dtype

        dtype = device_dtype(reader.dtype)
        self._slots = make_slots(1, reader.layout.size, dtype)
        self.lock, self.nowhere = threading.RLock(), 1

    array = WorkerSlots.array

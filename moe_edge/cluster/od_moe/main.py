"""The main node: all of the model but its experts, which workers compute by call.

It is a server without blocks (`engine.PlacedEngine`). Whom it asks for a layer's
experts follows from the layer's count and from what the shadow predicted; results are
those of the model, whatever was predicted.
"""

import threading
import time
from collections.abc import Sequence

import jax
import numpy as np

from moe_edge.cluster.answers import Answers
from moe_edge.cluster.engine import PlacedEngine
from moe_edge.cluster.ledger import Ledger
from moe_edge.cluster.membership import compiled_is_kept
from moe_edge.cluster.node import Node
from moe_edge.cluster.od_moe.groups import Groups, NoWorkers
from moe_edge.cluster.od_moe.roles import FIRST_WORKER, SHADOW
from moe_edge.cluster.od_moe.worker import ATTEMPTS, WorkerSlots
from moe_edge.cluster.programs import PlacedPrograms
from moe_edge.cluster.remote import Remote
from moe_edge.cluster.requests import Requests, ServedRequest
from moe_edge.cluster.tables import HERE, View
from moe_edge.cluster.transport import Transport
from moe_edge.cluster.warm_up import warm_up
from moe_edge.engine.programs import count_compiled, jit_step
from moe_edge.engine.session import Session, capacity_for
from moe_edge.engine.shadow import read_kv
from moe_edge.engine.weights import Weights
from moe_edge.offload.slots import make_slots
from moe_edge.offload.store import device_dtype
from moe_edge.predict.shadow import Shadow


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
        spread_E = self.groups.spread(self._shape[1])
        if version % ATTEMPTS == ATTEMPTS - 1:
            return None
        asked_LE = np.tile(
            np.append(spread_E, HERE).astype(np.int16), (self._shape[0], 1)
        )
        return View(version + 1, asked_LE, asked_LE, self._none_LE, self._none_L)


class MainEngine(PlacedEngine):
    """Runs a model whose experts are loaded on demand by workers.

    Attributes:
      request: whose step runs.
      steps: prompts and decode steps so far; `steps_before`: with the last prompt.
      predicted: count of a layer (`Groups`) -> experts, best first. What the shadow
        says last of a layer counts, also where it says so when the layer is over.
      decoded: (request, decode step from 1, layer, count, chosen) of all decode steps.
      waits_s: of every decode step: waiting for workers.
    """

    def __init__(self, weights, holdings, remote, ledger, programs, groups: Groups):
        super().__init__(weights, holdings, remote, ledger, programs)
        self._groups, self._asked = groups, remote.tables
        moe_layers = self.config.moe_layers
        self._place = {layer: place for place, layer in enumerate(moe_layers)}
        self.listener: ShadowLink | None = None
        self.request = -1
        self.restart()

    def restart(self) -> None:
        """Counts from here on."""
        self.steps = self.steps_before = 0
        self.predicted: dict[int, list[int]] = {}
        self.decoded: list[tuple[int, int, int, int, list[int]]] = []
        self.waits_s: list[float] = []
        self._decodes = False

    def _begin_prompts(self, session: Session, prompts) -> None:
        self._view, self._decodes = self._asked.view, False
        self.steps += 1
        self.steps_before = self.steps
        if self.listener is not None:
            last = self.steps * len(self._place) - 1
            self.listener.begin(session, prompts, self.steps, last)

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
        count, chosen = self.count(layer), ids_TK[0].tolist()
        index = self.steps - self.steps_before
        self.decoded.append((self.request, index, layer, count, chosen))
        row_E = np.full(E, HERE, np.int16)
        where = self._groups.choose(count, chosen, self.predicted.get(count, ()))
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
      read_kv: its program.
    """

    def __init__(self, transport: Transport, groups: Groups, periods: Shadow):
        self._transport, self._groups, self._periods = transport, groups, periods
        self.read_kv = jit_step(read_kv, static_argnames="count")
        self.alive = True
        self._length = 0

    def rehearse(self, session: Session) -> None:
        """Compiles what a session of this shape needs."""
        if self._periods.kv_period:
            for count in {session.capacity, self._periods.kv_period}:
                start_B = jax.device_put(np.zeros(1, np.int32))
                jax.block_until_ready(
                    self.read_kv(session.caches, start_B, count=count)
                )

    def begin(self, session: Session, prompts, steps_before: int, last: int) -> None:
        """A prompt is about to run; `last` is the count of its last layer."""
        self._length = len(prompts[0])
        for worker in self._groups.left():  # the shadow was ahead of the text before
            self._tell_passed(worker, last)
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
            kv = self.read_kv(session.caches, start_B, count=count)
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
                self._tell_passed(worker, count)

    def _tell_passed(self, worker: int, count: int) -> None:
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
            self.engine.predicted[fields["count"]] = fields["experts"]
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
        self.tell("token", {"id": number, "token": token, "done": done, "at_s": now_s})

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

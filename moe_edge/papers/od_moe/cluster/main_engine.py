"""The main node's engine: asks workers by a layer's count and by what was predicted.

It is a server without blocks (`engine.PlacedEngine`). Results are those of the model,
whatever was predicted.
"""

import time

import jax
import numpy as np

from moe_edge.cluster.node.engine import PlacedEngine
from moe_edge.cluster.node.tables import HERE, View
from moe_edge.cluster.roles import FIRST_WORKER, SHADOW
from moe_edge.cluster.transport.messages.transport import Transport
from moe_edge.engine.programs import jit_step
from moe_edge.engine.session import Session
from moe_edge.papers.od_moe.cluster.groups import Groups
from moe_edge.papers.od_moe.cluster.worker import ATTEMPTS
from moe_edge.papers.od_moe.shadow.engine import cut_kv, read_kv
from moe_edge.papers.od_moe.shadow.predictor import Shadow


class OdMoeTables:
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

    def begin_prompts(self, session: Session, prompts) -> None:
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
        self._session = session
        if self.listener is not None:
            if self.config.num_layers - 1 not in self._place:  # as `_here` did not
                self.listener.rows(session, self._index)
            self.listener.token(session, self._index, int(np.asarray(tokens_B)[0]))

    @property
    def _index(self) -> int:
        """Of the running decode step, from 1."""
        return self.steps - self.steps_before

    def count(self, layer: int) -> int:
        """Of a layer in the running step, through all texts."""
        return (self.steps - 1) * len(self._place) + self._place[layer]

    def _layer_view(self, layer: int, ids_TK: np.ndarray) -> View:
        E = self.config.moe.num_experts
        if not self._decodes:
            return self._asked.view_of(0, layer, self._groups.spread(E))
        count, chosen = self.count(layer), ids_TK[0].tolist()
        self.decoded.append((self.request, self._index, layer, count, chosen))
        row_E = np.full(E, HERE, np.int16)
        where = self._groups.choose(count, chosen, self.predicted.get(count, ()))
        for expert, worker in where.items():
            row_E[expert] = worker
        if self.listener is not None:
            self.listener.passed(count, set(where.values()))
        return self._asked.view_of(count * ATTEMPTS, layer, row_E)

    def _here(self, layer: int, *arguments):
        """The calls are on their way: while the last ones are, the shadow is told."""
        told = self._decodes and self.listener is not None
        if told and layer == self.config.num_layers - 1:
            self.listener.rows(self._session, self._index + 1)
        return super()._here(layer, *arguments)

    def _gather(self, *arguments):
        started_s = time.perf_counter()
        rows = super()._gather(*arguments)
        if self._decodes:
            self.waits_s[-1] += time.perf_counter() - started_s
        return rows


class ShadowLink:
    """What the main node tells shadow and workers while it runs.

    Attributes:
      read_kv: its program.
    """

    def __init__(self, transport: Transport, groups: Groups, periods: Shadow):
        self._transport, self._groups, self._periods = transport, groups, periods
        self.read_kv = jit_step(read_kv, static_argnames="count")
        self._alive, self._returns = True, False
        self._length = 0

    def leave(self) -> None:
        """The shadow does not hear what it is told."""
        self._alive = self._returns = False

    def come_back(self) -> None:
        """It hears again. What it has missed of this text cannot be made up for."""
        self._returns = not self._alive

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
        if self._returns:
            self._alive, self._returns = True, False
        for worker in self._groups.left():  # the shadow was ahead of the text before
            self._tell_passed(worker, last)
        fields = {"steps_before": steps_before, "capacity": session.capacity}
        arrays = {"prompt": np.array(prompts[0], np.int32)}
        self._post("begin", fields, arrays)

    def token(self, session: Session, index: int, token: int) -> None:
        """Decode step `index` (from 1) begins."""
        if index == 1 and self._periods.aligns_kv(index):
            self._rows(session, 0, session.capacity, self._length)
        self._post("token", {"index": index, "token": token}, {})

    def rows(self, session: Session, index: int) -> None:
        """Keys and values that are due at decode step `index` are there, before it."""
        if index > 1 and self._periods.aligns_kv(index):
            count = self._periods.kv_period
            self._rows(session, self._length + index - 1 - count, count, count)

    def _rows(self, session: Session, start: int, count: int, kept: int) -> None:
        start_B = jax.device_put(np.array([start], np.int32))
        kv = self.read_kv(session.caches, start_B, count=count)
        kv = cut_kv(session.caches, jax.device_get(kv), kept)
        sent = {f"kv{i}": each for i, each in enumerate(kv)}
        self._post("rows", {"start": start}, sent)

    def passed(self, count: int, asked: set[int]) -> None:
        """Workers of a layer's group that it does not ask may go on."""
        for worker in self._groups.members(count):
            if worker not in asked:
                self._tell_passed(worker, count)

    def _tell_passed(self, worker: int, count: int) -> None:
        self._transport.post(FIRST_WORKER + worker, "passed", {"count": count})

    def _post(self, name: str, fields: dict, arrays: dict) -> None:
        if self._alive:
            self._transport.post(SHADOW, name, fields, arrays)

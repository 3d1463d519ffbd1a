"""A server: runs its own requests, answers others, and does what the scheduler says.

The main thread steps the engine and, between two steps, takes over tables. The
transport's threads answer calls; they never wait for anybody. A third thread brings
blocks.
"""

import dataclasses
import time
from collections.abc import Callable

import numpy as np

from moe_edge.cluster.network.interface import Interface
from moe_edge.cluster.network.namespaces import DEVICE
from moe_edge.cluster.node.answers import Answers
from moe_edge.cluster.node.engine import PlacedEngine, dense_weights
from moe_edge.cluster.node.holdings import BlockReader, Holdings
from moe_edge.cluster.node.home_programs import ServerHomes, devices_of_process
from moe_edge.cluster.node.ledger import Ledger
from moe_edge.cluster.node.node import Order
from moe_edge.cluster.node.programs import PlacedPrograms
from moe_edge.cluster.node.remote import Remote
from moe_edge.cluster.node.serving_node import ServingNode
from moe_edge.cluster.node.tables import Tables
from moe_edge.cluster.node.warm_up import different, run_request
from moe_edge.cluster.node.way_back import WayBack
from moe_edge.cluster.prism.alone import load_alone, moved
from moe_edge.cluster.prism.block_loader import BlockLoader
from moe_edge.cluster.prism_options import PrismOptions
from moe_edge.cluster.roles import FIRST
from moe_edge.cluster.slots import slots_of
from moe_edge.cluster.transport.base import Call
from moe_edge.cluster.transport.messages.transport import Transport
from moe_edge.core.checks import MoeEdgeError, RequestError
from moe_edge.engine.layered import LayeredEngine
from moe_edge.engine.weights import Weights
from moe_edge.route.base import Route


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """How a server runs.

    Attributes:
      slots: blocks that it may hold.
      max_batch: requests that take turns.
      call_s: deadline of a call.
      table_s: of waiting for a table after one failed (`Remote`).
      device: network interface that is this server's alone, whose bytes are noted.
      route: what decode steps compute; None: the model's own choice.
    """

    slots: int
    max_batch: int = 1
    call_s: float = 5.0
    table_s: float = 30.0
    device: str | None = None
    route: Route | None = None


class Server(ServingNode):
    """One server of a cluster.

    Args:
      me: its number, from 0; others: how many there are in all.
      reader: an open checkpoint.
      weights: its dense part, on the device.
      programs: of the model, shared with other servers of this process; None: its own.
    """

    ledger_kind, engine_kind = Ledger, PlacedEngine

    def __init__(
        self,
        me: int,
        others: int,
        reader,
        weights: Weights,
        transport: Transport,
        options: ServerOptions,
        programs: PlacedPrograms | None = None,
    ):
        super().__init__(FIRST + me, transport, options.max_batch)
        config = weights.config
        self.me, self.options = me, options
        self._shape = config.num_layers, config.moe.num_experts
        devices = devices_of_process()
        given = options.slots, self._shape, BlockReader(reader)
        self.holdings = Holdings(*given, devices)
        self.tables = Tables(me, self.holdings)
        self.ledger = self.ledger_kind(me, others, self._shape)
        self._interface = Interface(options.device)
        dtype, homes = self.holdings.blocks.dtype, self.holdings.homes
        if homes is not None:
            programs = ServerHomes(config, dtype, homes, devices)
        elif programs is None:
            programs = PlacedPrograms(config, dtype)
        self.answers = Answers(programs, self.holdings)
        remote = Remote(
            me,
            transport,
            self.answers,
            self.tables,
            self.ledger,
            first_peer=FIRST,
            deadline_s=options.call_s,
            table_s=options.table_s,
            on_lost=self.on_lost,
        )
        where = weights, self.holdings, remote, self.ledger, programs
        self.engine = self.engine_kind(*where, options.route)
        self._answered: list[tuple] = []
        self._reader, self._weights = reader, weights
        self._alone: LayeredEngine | None = None  # instead, where it asks nobody
        self._way_back = WayBack(transport, self.fail)
        self._loader = BlockLoader(self.holdings, transport, self._arrived, self.fail)

    def make_orders(self) -> dict[str, Order]:
        return super().make_orders() | {
            "counts": Order(lambda *_: ({}, self.ledger.counts())),
            "table": Order(self._table_comes, self.install_table),
            "drop": Order(self._drop),
            "bring": Order(self._bring),
            "return": Order(later=self._return),
            "taken_in": Order(
                lambda fields, _: self._way_back.taken_in(fields["number"])
            ),
            "notes": Order(self._notes),
            "alone": Order(later=self._prepare_alone),
            "prepare": Order(later=self._prepare),
        }

    # What the transport answers with, in its threads.

    def call(self, peer: int, call: Call) -> np.ndarray | None:
        """Rows of another server's call; None if a block is not here."""
        started_s = time.perf_counter()
        rows = self.answers.compute(call)
        if rows is None and self._is_mine(call):
            rows = self.answers.compute(call, on_demand=True)
        ended_s = time.perf_counter()
        self._answered.append((started_s, ended_s - started_s, peer - FIRST))
        return rows

    def _is_mine(self, call: Call) -> bool:
        """Whether blocks that are not here are to be read for a call.

        So it is for blocks that nobody has, if the newest table names this server. A
        caller may have a newer one.
        """
        try:
            view = self.tables.newer(-1, 0.0)
        except MoeEdgeError:
            return False  # this server ends; another one may read them
        if view is None or call.version > view.version:
            return True
        return bool((view.target_LE[call.layer][call.block_P] == self.me).all())

    def block(self, layer: int, block: int) -> np.ndarray | None:
        """A block for another server."""
        if not (0 <= layer < self._shape[0] and 0 <= block < self._shape[1]):
            return None
        return self.holdings.record(layer, block)

    def _table_comes(self, fields, arrays) -> None:
        """Who waits in the midst of a step sees it at once."""
        self.tables.offer(fields["version"], *_table(arrays))

    def install_table(self, fields, arrays) -> None:
        """Between steps: the newest table is in force."""
        if self.tables.install() is not None:
            self.tell("confirmed", {"version": self.tables.view.version})

    def _drop(self, fields, arrays) -> None:
        """Nobody asks for them: before what comes into their slots."""
        with self.answers.reading:
            self.holdings.drop(arrays["cells"].tolist())

    def _bring(self, fields, arrays) -> None:
        self._loader.bring(fields["order"], arrays["cells"])

    def stop(self, fields, arrays) -> None:
        self.tables.close(RequestError("the run is over"))
        self._way_back.end()
        super().stop(fields, arrays)

    def goes_back(self, kind: str) -> bool:
        """Not if the scheduler is dead; else it was away, or the network was."""
        return kind == "hung"

    def go_back(self) -> None:
        self.tables.close(RequestError("this server was off the scheduler's list"))
        self._way_back.begin()

    def _return(self, fields, arrays) -> None:
        """It will be taken in again: nothing of what it had counts any more."""
        self._way_back.returning(fields["number"])
        self._loader.forget()
        for server in fields["servers"]:
            self.back(fields | {"server": server}, {})
        self._prepare(fields, arrays)

    def fail(self, error: BaseException) -> None:
        if not self._stopped.is_set():
            self.tables.close(error)  # whatever it waits for
        super().fail(error)

    def _notes(self, fields, arrays):
        """What this server has noted."""
        sent = {
            f"{peer}:{int(kind)}": [count.messages, count.bytes]
            for (peer, kind), count in self.transport.traffic.sent().items()
        }
        facts = self.ledger.sums() | {
            "most_used": self.holdings.most_used,
            "sent": sent,
            "interface": self._interface.sent,
            "compiled": self.compiled,
        }
        engine = self._stepping or self.engine
        changed = engine.moved()
        facts |= {"routed": changed.routed, "substituted": changed.substituted}
        if engine is self._alone:
            facts |= moved(engine)
        arrays = {f"lookups_{k}": v for k, v in self.ledger.lookups().items()}
        arrays["calls"] = self.ledger.calls()
        arrays["answered"] = np.array(self._answered, np.float64).reshape(-1, 3)
        arrays["brought"] = self._loader.brought
        return facts, arrays

    # The main thread.

    def run(self) -> None:
        self._loader.start()
        try:
            super().run()
        finally:
            self._loader.stop()
            if self._alone is not None:
                self._alone.close()

    def compile(self, fields, arrays) -> None:
        if "alone" in fields and self._alone is None:
            where = self._reader, self._weights, self.options.slots, fields["alone"]
            given = self.engine.programs, self.options.route
            self._alone = load_alone(*where, *given)
        super().compile(fields, arrays)

    def rehearse(self, sizes) -> None:
        if self._alone is not None:
            for size in different(sizes):
                run_request(self._alone, *size)

    def _prepare_alone(self, fields, arrays) -> None:
        """A new run in which it asks nobody: it begins with empty slots."""
        self._alone.restart()
        self._interface.reset()
        self.begin_run(fields["number"], self._alone)

    def _prepare(self, fields, arrays) -> None:
        """A new run: its blocks are read."""
        self.holdings.fill(arrays["held_LE"].astype(bool))
        self.holdings.most_used = self.options.slots - self.holdings.free
        self.tables.begin(fields["version"], *_table(arrays))
        self._answered.clear()
        self._loader.clear()
        self._interface.reset()
        self.begin_run(fields["number"])

    def _arrived(self, order: int, own: list[tuple[int, int]]) -> None:
        self.tell("arrived", {"order": order, "own": own})


def make_server(
    number: int,
    options: PrismOptions,
    transport: Transport,
    reader,
    kind: Callable[..., Server] = Server,
) -> Server:
    """The server of process `number`; kind: what makes it."""
    config, me = reader.config, number - FIRST
    slots = slots_of(options, len(config.moe_layers) * config.moe.num_experts)
    own = ServerOptions(
        slots=slots[me],
        max_batch=options.max_batch,
        call_s=options.call_s,
        table_s=ServerOptions.table_s + 2 * options.hung_s,  # it may ask that often
        device=None if options.link_mbps is None else DEVICE,
        route=options.chosen_route,
    )
    weights = dense_weights(reader)
    return kind(me, options.servers, reader, weights, transport, own)


def _table(arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return arrays["target_LE"], arrays["read_LE"].astype(bool)

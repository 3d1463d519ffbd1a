"""The servers of a cluster that serves over HTTP.

The front answers clients: its driver steps row slots over a placed engine, in the
engine's thread; the scheduler's orders come in another. Holders only answer its calls.
"""

import json
import os
import queue
import sys
import threading
from pathlib import Path

import jax
import numpy as np

from moe_edge.cluster.node.engine import PlacedEngine
from moe_edge.cluster.node.ledger import Ledger
from moe_edge.cluster.node.node import Order
from moe_edge.cluster.node.warm_up import actors
from moe_edge.cluster.prism.server import Server
from moe_edge.cluster.transport.base import Call
from moe_edge.core.progress import progress
from moe_edge.engine.slot_programs import SlotShapes
from moe_edge.serve.chat_template import find_template
from moe_edge.serve.cluster_run import READY, SUMMARY, Cluster
from moe_edge.serve.driver import Driver
from moe_edge.serve.http_service import serve_http
from moe_edge.serve.options import make_driver
from moe_edge.serve.served_model import make_served_model
from moe_edge.serve.service import listen


class NoLedger(Ledger):
    """Notes nothing: a server that serves for ever would note for ever."""

    def chunk(self) -> None:
        pass

    def looked_up(self, layer, ids_TK, weights_TK, view) -> None:
        pass

    def called(self, server, call, rows, sent_s, ended_s) -> None:
        pass


class SteppingEngine(PlacedEngine):
    """Steps of one thread, tables of another.

    Attributes:
      stepping: held from a step's first layer to the end of its last program; a table
        that is taken over under it is taken over between two steps.
    """

    def __init__(self, *given):
        super().__init__(*given)
        self.stepping = threading.Lock()

    def _run_layers(self, session, x, chunk, on_routing):
        with self.stepping:
            # Of each chunk: between those of a prompt, other rows take steps.
            self._view = self.remote.tables.view
            state = super()._run_layers(session, x, chunk, on_routing)
            return jax.block_until_ready(state)


class Holder(Server):
    """Holds experts and computes the front's calls."""

    ledger_kind, engine_kind = NoLedger, SteppingEngine

    def serves(self, cluster: Cluster, folder: str) -> None:
        """What is served; before `run`."""
        config, serving = self.engine.config, cluster.serving
        sizes = serving.sizes(serving.context(config.max_positions))
        self._shapes = SlotShapes(config, **sizes)

    def call(self, peer: int, call: Call) -> np.ndarray | None:
        rows = super().call(peer, call)
        self._answered.clear()  # nobody asks for these notes
        return rows

    def compile(self, fields, arrays) -> None:
        """What the front will ask for: a program a number of its tokens."""
        shapes, config = self._shapes, self.engine.config
        tokens = {*shapes.rows, *(R * size for R, size, _ in shapes.prompt_shapes())}
        for count in progress(sorted(tokens), "compiling calls"):
            call = Call(
                layer=config.moe_layers[0],
                bucket=count,
                version=0,
                x_TD=np.zeros((1, config.d_model), np.float32),
                token_P=np.zeros(1, np.uint16),
                block_P=np.zeros(1, np.uint16),
            )
            self.answers.rehearse(call)

    def install_table(self, fields, arrays) -> None:
        with self.engine.stepping:
            super().install_table(fields, arrays)


class Front(Holder):
    """Answers clients."""

    def serves(self, cluster: Cluster, folder: str) -> None:
        super().serves(cluster, folder)
        server, reader = cluster.server, self._reader
        self._cluster, self._folder = cluster, Path(folder)
        self._drivers: queue.SimpleQueue[Driver] = queue.SimpleQueue()
        self._model = make_served_model(
            cluster.given["checkpoint"],
            reader,
            max_context=cluster.serving.context(reader.config.max_positions),
            default_floor=cluster.serving.default_min_k,
            lossless=self.engine.lossless and reader.config.cache_type == "float32",
        )
        folder_of = self._model.tokenizer.folder
        self._template = find_template(
            folder_of, server.chat_template, server.tool_parser
        )
        self._socket = listen(server.host, server.port)

    def compile(self, fields, arrays) -> None:
        """Row slots, with experts here, elsewhere and both."""
        serving, fail_step = self._cluster.serving, self._cluster.server.fail_step
        self._driver = make_driver(self.engine, serving, fail_step=fail_step)
        for engine in actors(self.engine, self.answers, NoLedger):
            self._driver.slots.warm_up(engine)
        self._model.grammars.prepare()

    def goes_back(self, kind: str) -> bool:
        """Never: the scheduler ends without it."""
        return False

    def make_orders(self) -> dict[str, Order]:
        return super().make_orders() | {"serve": Order(later=self._serve)}

    def _serve(self, fields, arrays) -> None:
        """All servers are ready."""
        self._drivers.put(self._driver)

    def num_compiled(self) -> int:
        return self._driver.slots.num_compiled()

    def run(self) -> None:
        """HTTP in this thread, where signals come; the scheduler's orders beside it."""
        orders = threading.Thread(target=self._obey, name="orders", daemon=True)
        orders.start()
        with self._socket:
            summary = serve_http(
                self._drivers.get,
                self._socket,
                self._model,
                self._template,
                self._cluster.serving,
                self._cluster.server,
                (self._folder / READY).touch,
            )
        (self._folder / SUMMARY).write_text(json.dumps(summary), encoding="utf-8")
        self.tell("over")
        orders.join()

    def _obey(self) -> None:
        """Orders until the scheduler says stop; an error ends the process."""
        try:
            super().run()
        except BaseException as error:
            line = " ".join(str(error).split())
            print(f"error: {line}", file=sys.stderr, flush=True)
            os._exit(getattr(error, "exit_code", 1))

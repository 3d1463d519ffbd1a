"""OD-MoE live in one process: main, shadow and workers in threads, on real sockets.

Every part is the real one but for `jax.distributed`, and all share compiled programs. A
process is killed as in `live_cluster.py`: its transport closes without a word.
"""

import functools
import json
import threading
from pathlib import Path

import numpy as np

from moe_edge.cluster import roles
from moe_edge.cluster.node.programs import PlacedPrograms
from moe_edge.cluster.od_moe.groups import Groups, NoWorkers, slots_of
from moe_edge.cluster.od_moe.main import MainNode
from moe_edge.cluster.od_moe.programme import OdProgramme
from moe_edge.cluster.od_moe.shadow_node import ShadowNode
from moe_edge.cluster.od_moe.worker import Worker, WorkerNode
from moe_edge.cluster.options import ClusterOptions
from moe_edge.cluster.process import dense_weights
from moe_edge.cluster.roles import SCHEDULER
from moe_edge.cluster.transport.messages.transport import MessagesTransport
from moe_edge.convert.open import open_checkpoint
from moe_edge.engine.generate import generate
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.shadow import make_shadow
from moe_edge.engine.weights import load_weights
from moe_edge.offload.store import HostStore, device_dtype
from moe_edge.predict.shadow import PRECISIONS, Shadow

SECRET = b"a secret of the tests"


@functools.cache
def programs_of(checkpoint: str) -> PlacedPrograms:
    reader = open_checkpoint(checkpoint)
    return PlacedPrograms(reader.config, device_dtype(reader.dtype))


@functools.cache
def weights_of(checkpoint: str):
    return dense_weights(open_checkpoint(checkpoint))


@functools.cache
def shadow_of(checkpoint: str, precision: str):
    store = HostStore(open_checkpoint(checkpoint))
    return make_shadow(weights_of(checkpoint), precision, store)


@functools.cache
def resident_of(checkpoint: str) -> ResidentEngine:
    return ResidentEngine(load_weights(open_checkpoint(checkpoint)))


@functools.cache
def resident_tokens(checkpoint: str, prompt: tuple[int, ...], new: int) -> list[int]:
    return generate(resident_of(checkpoint), [prompt], new).tokens[0]


class Killed(Exception):
    """Ends the thread of a node that a test kills."""


class LiveNode:
    """A node and its thread.

    Attributes:
      error: what its thread ended by, if anything.
    """

    def __init__(self, transport, node):
        self.transport, self.node = transport, node
        self.error, self.killed = None, False
        transport.on_lost = node.on_lost
        transport.serve(node)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            self.node.run()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
            self.transport.close()  # as the end of its process would

    def kill(self) -> None:
        self.killed = True
        self.transport.close()
        self.node.fail(Killed())

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()


class LiveOdMoe:
    """All processes of a run; a context manager.

    Attributes:
      nodes: name -> `LiveNode`; programme: the scheduler's.
    """

    def __init__(self, checkpoint, prompts: Path, folder: Path, **options):
        folder.mkdir(exist_ok=True)
        own = {"workers": 2, "groups": 2, "load_bytes_per_s": "1e9"}
        own |= {"max_new_tokens": 6} | options
        self.options = options = ClusterOptions(
            checkpoint=str(checkpoint), mode="od_moe", prompts=str(prompts), **own
        )
        self.folder, self.checkpoint = folder, options.checkpoint
        self.transport = MessagesTransport(SCHEDULER, SECRET)
        self.programme = OdProgramme(options, self.transport, None, folder)
        self.scheduler = self.programme.scheduler
        self.scheduler.strike = self._strike
        self.transport.serve(self.scheduler)
        self.nodes = {
            options.name_of(number): self._node(number)
            for number in range(1, options.processes)
        }
        peers = {one.transport.peer: one.transport for one in self.nodes.values()}
        peers[SCHEDULER] = self.transport
        for peer, transport in peers.items():
            for other, there in peers.items():
                if other != peer:
                    transport.connect(other, there.address)
        for one in self.nodes.values():
            one.start()

    def _node(self, number: int) -> LiveNode:
        options, reader = self.options, open_checkpoint(self.checkpoint)
        config, K = reader.config, reader.config.moe.top_k
        transport = MessagesTransport(number, SECRET)
        groups = Groups(options.workers, options.groups, K)
        programs, known = programs_of(self.checkpoint), options.shadow in PRECISIONS
        precision = options.shadow if known else "full"
        periods = Shadow(precision, options.token_period, options.kv_period)
        if number == roles.MAIN:
            where = number, reader, weights_of(self.checkpoint), transport
            node = MainNode(*where, groups, periods, call_s=5.0, programs=programs)
        elif number == roles.SHADOW:
            shadow = shadow_of(self.checkpoint, precision) if known else None
            shape = config.moe_layers, config.moe.num_experts, K
            node = ShadowNode(
                *(number, transport, groups, *shape, shadow, periods),
                speculative=options.departure == "speculative",
            )
        else:
            slots = slots_of(K, options.workers, options.groups)
            node = WorkerNode(number, transport, Worker(reader, programs, slots))
        return LiveNode(transport, node)

    def run(self) -> dict:
        """The whole run: its row of `cluster.json`."""
        self.programme.run({})
        stored = (self.folder / "cluster.json").read_text(encoding="utf-8")
        return json.loads(stored)["row"]

    @property
    def tokens(self) -> list[list[int]]:
        """Of every request, as written."""
        text = (self.folder / "generations.jsonl").read_text(encoding="utf-8")
        return [json.loads(line)["tokens"] for line in text.splitlines()]

    @property
    def wanted(self) -> list[list[int]]:
        """Of the model on one machine."""
        new = self.options.max_new_tokens
        prompts = [tuple(one.prompt) for one in self.programme.wanted.asked]
        return [resident_tokens(self.checkpoint, prompt, new) for prompt in prompts]

    def predictions(self) -> dict[str, np.ndarray]:
        with np.load(self.folder / "predictions.npz") as stored:
            return dict(stored)

    def _strike(self, drill) -> None:
        self.kill(self.options.name_of(drill.server + 1))

    def kill(self, name: str) -> None:
        self.nodes[name].kill()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.scheduler.tell_all("stop")
        for one in self.nodes.values():
            if not one.killed:
                one.join()
        for one in self.nodes.values():
            one.transport.close()
        self.transport.close()
        if kind is None:
            errors = [one.error for one in self.nodes.values() if one.error is not None]
            errors = [error for error in errors if not isinstance(error, NoWorkers)]
            assert not errors, errors[0]

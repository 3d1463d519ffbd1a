"""OD-MoE live in one process: main, shadow, workers and their scheduler."""

import functools
import json
from pathlib import Path

import numpy as np

from moe_edge.cluster.drills import ACCUSE
from moe_edge.cluster.scheduler.scheduler import Scheduler
from moe_edge.convert.open import open_checkpoint
from moe_edge.engine.generate import generate
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import load_weights
from moe_edge.papers.od_moe.cluster.groups import NoWorkers
from moe_edge.papers.od_moe.cluster.nodes import Parts, make_node
from moe_edge.papers.od_moe.cluster.programme import OdProgramme
from moe_edge.papers.od_moe.options import OdMoeOptions
from tests.support.live_nodes import LiveNode, LiveNodes


@functools.cache
class SharedParts(Parts):
    """Nodes of one checkpoint share what they are made of."""

    def __init__(self, checkpoint: str):
        super().__init__(open_checkpoint(checkpoint))

    weights = functools.cache(Parts.weights)
    programs = functools.cache(Parts.programs)
    shadow = functools.cache(Parts.shadow)


@functools.cache
def resident_of(checkpoint: str) -> ResidentEngine:
    return ResidentEngine(load_weights(open_checkpoint(checkpoint)))


@functools.cache
def resident_tokens(checkpoint: str, prompt: tuple[int, ...], new: int) -> list[int]:
    return generate(resident_of(checkpoint), [prompt], new).tokens[0]


class LiveOdMoe(LiveNodes):
    """All processes of a run.

    Attributes:
      nodes: name -> `LiveNode`; programme: the scheduler's.
    """

    def __init__(self, checkpoint, prompts: Path, folder: Path, **options):
        super().__init__()
        folder.mkdir(exist_ok=True)
        own = {"workers": 2, "groups": 2, "load_bytes_per_s": "1e9"}
        own |= {"max_new_tokens": 6} | options
        self.options = options = OdMoeOptions(
            checkpoint=str(checkpoint), prompts=str(prompts), **own
        )
        self.folder, self.checkpoint = folder, options.checkpoint
        self.programme = OdProgramme(options, self.transport, None, folder)
        self.scheduler = self.programme.scheduler
        self.scheduler.strike = self._strike
        self.nodes = {
            options.name_of(number): self._node(number)
            for number in range(1, options.processes)
        }
        self.start(self.nodes.values())

    def _node(self, number: int) -> LiveNode:
        of = self.checkpoint, SharedParts
        return LiveNode(number, lambda to: make_node(number, self.options, to, *of))

    def run(self) -> dict:
        """The whole run: its row of `cluster.json`."""
        self.programme.run({})
        stored = (self.folder / "cluster.json").read_text(encoding="utf-8")
        return json.loads(stored)["row"]

    @property
    def tokens(self) -> list[list[int]]:
        """Of every request, as written."""
        return self._written("tokens")

    @property
    def servers(self) -> list[int]:
        """Where each request came, as written."""
        return self._written("server")

    def _written(self, key: str) -> list:
        text = (self.folder / "generations.jsonl").read_text(encoding="utf-8")
        return [json.loads(line)[key] for line in text.splitlines()]

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
        if drill.kind == ACCUSE:
            Scheduler.strike(self.scheduler, drill)
        else:
            self.kill(self.options.name_of(drill.server + 1))

    def kill(self, name: str) -> None:
        self.nodes[name].kill()

    @property
    def errors(self) -> list[BaseException]:
        return [one for one in super().errors if not isinstance(one, NoWorkers)]

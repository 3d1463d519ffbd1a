"""The scheduler while server 0 answers clients: who is there, who holds what."""

import numpy as np

from moe_edge.cluster.prism.judge import Judge
from moe_edge.cluster.prism.programme import PrismProgramme
from moe_edge.cluster.scheduler.requests import NobodyLeft
from moe_edge.cluster.scheduler.serving import Serving

FRONT = 0  # the server that answers clients


class OpenServing(Serving):
    """A run without requests of the scheduler's own: until server 0 says it is over."""

    is_over = False

    def __init__(self, scheduler, holders):
        super().__init__(scheduler, holders, [], None)
        self._actions["over"] = self._over

    def _over(self, server: int, fields: dict, at_s: float) -> None:
        self.is_over = True

    def _replace(self, who: int, kind: str) -> None:
        if who == FRONT:
            raise NobodyLeft(f"server {FRONT}, which answers clients, is {kind}")
        print(f"server {who} is {kind}; others take over its experts", flush=True)
        super()._replace(who, kind)


class ServedProgramme(PrismProgramme):
    """Places experts for server 0 and keeps the table while it serves."""

    def run(self, members: dict[int, dict]) -> None:
        """To the end of server 0's serving."""
        print(f"compiled in {self.warm_up():.1f} s", flush=True)
        config, scheduler = self.config, self.scheduler
        layers, E = len(config.moe_layers), config.moe.num_experts
        uniform_NLE = np.full((self.options.servers, layers, E), 1 / E)
        held_NLE = self._place("optimal", uniform_NLE).on_NLE
        keeper = scheduler.prepare(
            held_NLE, Judge(scheduler, held_NLE.shape, None, None)
        )
        serving = OpenServing(scheduler, keeper)
        scheduler.tell(FRONT, "serve")
        serving.run()
        notes, _ = scheduler.notes()
        compiled = sum(facts["compiled"] for facts, _ in notes.values())
        print(f"programs compiled after ready: {compiled}", flush=True)

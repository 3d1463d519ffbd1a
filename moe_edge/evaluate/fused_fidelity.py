"""Fidelity of lossy options of mode fused: an engine for each, over the same records.

A route, and what the host computes, are part of an engine's program, so nothing is
switched: engines share the weights and the records in host memory, and each has slots
of its own.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_edge.engine.fused import FusedEngine
from moe_edge.engine.load import open_run, prepare_process
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import assemble, check_offload
from moe_edge.engine.weights import load_weights
from moe_edge.evaluate.fidelity import Deferral, facts_of
from moe_edge.evaluate.likelihood import Forced
from moe_edge.evaluate.stepwise import ForcedRun, score_in_turn
from moe_edge.offload.store import HostStore
from moe_edge.route.base import Route


def options_of(choice: Route | Deferral, base: OffloadOptions) -> OffloadOptions:
    """The user's options with one lossy choice, or none, in place of theirs."""
    if isinstance(choice, Route):
        changed = {"route": choice, "route_options": {}, "assist_deferred": False}
        return dataclasses.replace(base, **changed)
    own = base.assist_options if choice.assist == base.assist else {}
    helped = {"assist": choice.assist, "assist_options": own}
    helped |= {"assist_in_fused": True, "assist_deferred": True}
    return dataclasses.replace(base, route="topk", route_options={}, **helped)


class FusedEngines:
    """Makes and measures engines of a checkpoint.

    Args:
      checkpoint: path or name.
      offload: of mode fused; its lossy options are not used.
      batch, capacity: rows decoded together and their tokens, for an absolute budget.
    Raises:
      ConfigError, CapacityError: as `load_engine`.
    """

    def __init__(
        self, checkpoint: str, offload: OffloadOptions, *, batch: int, capacity: int
    ):
        self._reader = open_run(checkpoint)
        prepare_process(self._reader, offload)
        self._base, self._room = offload, {"batch": batch, "capacity": capacity}
        check_offload(self._reader, offload, **self._room)
        self._weights = load_weights(self._reader, with_experts=False)
        self._store = HostStore(self._reader, offload.memory)
        self._hosts = self._store.pin_layers(self._weights.config.num_layers)

    def make(self, choice: Route | Deferral) -> FusedEngine:
        """The engine of a choice."""
        options = options_of(choice, self._base)
        context = check_offload(self._reader, options, **self._room)
        given = options, self._weights, self._store
        return assemble(*given, context=context, hosts=self._hosts, **self._room)

    def run(
        self,
        choices: Sequence[Route | Deferral],
        rows: Sequence[Forced],
        batch: int,
        reference: ForcedRun,
    ) -> list[tuple[ForcedRun, dict[str, Any]]]:
        """Each choice's run and its card.

        The engines are all there at once and take turns (`score_in_turn`). Each has
        scored the first batch before, which compiles its programs, and begins with
        empty slots.
        """
        engines: list[FusedEngine] = []
        try:
            for choice in choices:
                engines.append(self.make(choice))
            score_in_turn(engines, rows[:batch], batch)
            for engine in engines:
                engine.restart()
            runs = score_in_turn(engines, rows, batch)
            found = [*zip(choices, engines, runs, strict=True)]
            return [(run, fused_card(*each, run, reference)) for *each, run in found]
        finally:
            for engine in engines:
                engine.close()


def fused_card(
    choice: Route | Deferral, engine: FusedEngine, run: ForcedRun, reference: ForcedRun
) -> dict[str, Any]:
    """What one measurement says, in JSON's types. Of a deferral `changed_ratio` is the
    share of the experts used that the host computed."""
    if isinstance(choice, Deferral):
        used = int(engine.expert_state().lookups[True].sum())
        changed = engine.report()["host_computed"] / max(1, used)
    else:
        moved = engine.moved()
        changed = moved.substituted / max(1, moved.routed)
    found = facts_of(choice, run, reference, changed, engine.movement()["hit_ratio"])
    return found | {
        "bytes_per_token": run.bytes_moved / max(1, found["tokens"]),
        "step_s": float(np.median(run.step_s)),
    }

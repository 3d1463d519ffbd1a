"""Ways to score a text under every lossy option: decode steps, or layer by layer."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from moe_edge.bench.fidelity.rows import forced_rows
from moe_edge.bench.fidelity.study import FidelitySettings, room_of
from moe_edge.engine.load import Loaded
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.resident import ResidentEngine
from moe_edge.evaluate.fidelity import Deferral, SwitchEngine, card, facts_of
from moe_edge.evaluate.fused_fidelity import FusedEngines
from moe_edge.evaluate.layerwise import Cached, LayerwiseRun, LayerwiseText
from moe_edge.evaluate.stepwise import ForcedRun, score_batches
from moe_edge.kernels.assist import open_calls
from moe_edge.offload.budget import parse_budget
from moe_edge.offload.evict_base import get_eviction
from moe_edge.route.base import Route

Choices = Sequence[Route | Deferral]
Measured = Iterator[tuple[ForcedRun, dict[str, Any]]]
# (options, rows together, what they are compared with) -> each one's run and card.
Measure = Callable[[Choices, int, ForcedRun], Measured]


class Scorer(Protocol):
    """Scores the rows of a text."""

    def plain(self, engine: ResidentEngine, batch: int) -> ForcedRun:
        """All experts resident, `batch` rows together."""

    def budget(
        self, options: OffloadOptions
    ) -> contextlib.AbstractContextManager[Measure]:
        """What measures lossy options under these."""


class Stepwise:
    """Decode steps of the offloaded engine itself, after a prefilled prompt."""

    def __init__(self, settings: FidelitySettings, loaded: Loaded):
        self._settings = settings
        self._rows = forced_rows(settings, loaded.tokenizer)

    def plain(self, engine: ResidentEngine, batch: int) -> ForcedRun:
        return score_batches(engine, self._rows, batch)

    @contextlib.contextmanager
    def budget(self, options: OffloadOptions) -> Iterator[Measure]:
        room = room_of(self._settings)
        switch = SwitchEngine(self._settings.checkpoint, options, **room)

        def measure(routes: Choices, batch: int, reference: ForcedRun) -> Measured:
            for route in routes:
                run = switch.run(route, self._rows, batch)
                yield run, card(route, switch, run, reference)

        try:
            yield measure
        finally:
            switch.close()


class Fused(Stepwise):
    """Decode steps of engines of mode fused: one after another, or in turn.

    Raises:
      ConfigError: the host is to compute experts, and cannot.
    """

    def __init__(self, settings: FidelitySettings, loaded: Loaded):
        if settings.deferred or settings.base.assist_in_fused:
            open_calls()  # before anything is scored
        super().__init__(settings, loaded)

    @contextlib.contextmanager
    def budget(self, options: OffloadOptions) -> Iterator[Measure]:
        settings = self._settings
        engines = FusedEngines(settings.checkpoint, options, **room_of(settings))

        def measure(choices: Choices, batch: int, reference: ForcedRun) -> Measured:
            count = len(choices) if settings.in_turn else 1
            for at in range(0, len(choices), count):
                given = choices[at : at + count], self._rows, batch, reference
                yield from engines.run(*given)

        yield measure


class Layerwise:
    """All tokens pass a layer together; as decode steps of one row after the other.

    The rows have no prompt: all of their tokens are decoded, and all but the first are
    scored. Every layer has its share of the slots.
    """

    def __init__(self, settings: FidelitySettings, loaded: Loaded):
        rows = forced_rows(settings, loaded.tokenizer)
        self._tokens_NS = np.array([row.ids for row in rows], np.int32)
        self._text = LayerwiseText(loaded.engine, self._tokens_NS)

    def plain(self, engine: ResidentEngine, batch: int) -> ForcedRun:
        return LayerwiseText(engine, self._tokens_NS).run().forced

    @contextlib.contextmanager
    def budget(self, options: OffloadOptions) -> Iterator[Measure]:
        slots = slots_of(options, self._text.config.moe.num_experts)
        eviction = get_eviction(options.eviction, **options.eviction_options)

        def measure(routes: Choices, batch: int, reference: ForcedRun) -> Measured:
            for route in routes:
                found = self._text.run(route, Cached(eviction, slots))
                ratios = found.changed_ratio, hit_ratio(found)
                run = found.forced
                yield run, facts_of(route, run, reference, *ratios)

        yield measure


def slots_of(options: OffloadOptions, num_experts: int) -> int:
    """Slots of each layer, by the share of the experts' bytes."""
    return max(1, int(parse_budget(options.device_memory).share * num_experts + 1e-9))


def hit_ratio(run: LayerwiseRun) -> float:
    """Share of the experts used that were in slots."""
    used_TK = run.trace.ids_TK >= 0
    return float(run.trace.hit_TK[used_TK].mean())


def scorer_of(settings: FidelitySettings, loaded: Loaded) -> Scorer:
    """The way that the settings ask for."""
    if settings.layerwise:
        return Layerwise(settings, loaded)
    return (Fused if settings.base.mode == "fused" else Stepwise)(settings, loaded)

"""Fidelity of lossy routes: an offloaded engine against the unmodified model.

In mode layered one engine serves all routes of a budget: the route is switched and the
cache emptied between measurements, so nothing is compiled twice and no route inherits
another's cache. In mode fused a route is part of the program (`fused_fidelity`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from moe_edge.core.checks import ConfigError, check_count
from moe_edge.engine.layered import LayeredEngine
from moe_edge.engine.load import load_engine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.evaluate.agreement import compare
from moe_edge.evaluate.stepwise import Forced, ForcedRun, score_batches
from moe_edge.evaluate.texts import spread_rows
from moe_edge.route.base import ROUTES, Route, TopK, get_route


@dataclasses.dataclass(frozen=True)
class Deferral:
    """The host computes absent experts, whose outputs the next layer adds; mode fused.

    Attributes:
      assist: by whose rule it takes them.
    """

    assist: str

    name: ClassVar[str] = "assist_deferred"


class CountedRoute(Route):
    """Another route, exchangeable, with a count of what it changed.

    Attributes:
      inner: the route that acts.
      chosen, substituted, dropped: experts over all tokens since `use`.
    """

    name = "counted"
    SOURCE = "measuring instrument"

    def __init__(self, inner: Route | None = None):
        self.use(inner or TopK())

    def use(self, inner: Route) -> None:
        """Lets another route act and counts from 0."""
        self.inner = inner
        self.chosen = self.substituted = self.dropped = 0

    @property
    def lossless(self) -> bool:
        return self.inner.lossless

    @property
    def changed_ratio(self) -> float:
        """Share of the model's choices that were substituted or dropped."""
        return (self.substituted + self.dropped) / max(1, self.chosen)

    def route(self, layer, scores_TE, resident_E, params, ids_TK, weights_TK):
        new_TK, new_weights_TK = self.inner.route(
            layer, scores_TE, resident_E, params, ids_TK, weights_TK
        )
        E = scores_TE.shape[1]
        changed_TK = np.asarray(new_TK) != ids_TK
        is_none_TK = np.asarray(new_TK) == E
        self.chosen += int((ids_TK < E).sum())
        self.dropped += int((changed_TK & is_none_TK).sum())
        self.substituted += int((changed_TK & ~is_none_TK).sum())
        return new_TK, new_weights_TK


class SwitchEngine:
    """An offloaded engine whose route can be exchanged.

    Args:
      checkpoint: path or name.
      offload: its route is only the first one.
      batch: rows decoded together, for an absolute budget.
      capacity: their tokens.
      **options: activations and kv_cache, as of `load_engine`.
    Raises:
      ConfigError: mode fused.
    """

    def __init__(
        self,
        checkpoint: str,
        offload: OffloadOptions,
        *,
        batch: int,
        capacity: int,
        **options: str,
    ):
        if offload.mode == "fused":
            raise ConfigError(
                f"routes are exchanged in mode layered alone, got {offload.mode}; use "
                "that, or an engine a route (evaluate/fused_fidelity.py)"
            )
        offload = dataclasses.replace(offload, mode="layered")
        room = {"batch": batch, "capacity": capacity}
        loaded = load_engine(checkpoint, offload=offload, **room, **options)
        self.route = CountedRoute(get_route(offload.route, **offload.route_options))
        self.engine = LayeredEngine(
            loaded.engine.weights,
            loaded.engine.layer_step,
            route=self.route,
            backends=loaded.engine.backends,
            programs=loaded.engine.programs,
        )

    def empty(self) -> None:
        """Takes every block out of the cache and forgets all counts."""
        self.engine.layer_step.empty()
        self.engine.reset_records()

    def start(self, route: Route) -> None:
        """Lets a route act from now on, with an empty cache."""
        self.empty()
        self.route.use(route)

    def run(self, route: Route, rows: Sequence[Forced], batch: int) -> ForcedRun:
        """Scores the rows with a route, starting with an empty cache."""
        self.start(route)
        return score_batches(self.engine, rows, batch)

    def close(self) -> None:
        """Ends the queue's thread."""
        self.engine.queue.close()


def lossy_routes(a_values, thresholds, bonuses=()) -> list[Route]:
    """Every lossy route with a strength that has values, by each of its rules."""
    values = {"a": a_values, "threshold": thresholds, "bonus": bonuses}
    return [
        get_route(name, **rule, **{option: float(value)})
        for option in values
        for name, kind in ROUTES.items()
        if kind.strength == option
        for rule in kind.rules
        for value in values[option]
    ]


def card(
    route: Route, switch: SwitchEngine, run: ForcedRun, reference: ForcedRun
) -> dict[str, Any]:
    """What one measurement of a route says, in JSON's types."""
    ratios = switch.route.changed_ratio, switch.engine.movement()["hit_ratio"]
    found = facts_of(route, run, reference, *ratios)
    return found | {
        "bytes_per_token": run.bytes_moved / max(1, found["tokens"]),
        "step_s": float(np.median(run.step_s)),
    }


def facts_of(
    choice: Route | Deferral,
    run: ForcedRun,
    reference: ForcedRun,
    changed_ratio: float,
    hit_ratio: float,
) -> dict[str, Any]:
    """What a card says of any lossy option, whatever it was run by."""
    return {
        "option": choice.name,
        **dataclasses.asdict(choice),
        **dataclasses.asdict(compare(run, reference)),
        "changed_ratio": changed_ratio,
        "hit_ratio": hit_ratio,
    }


def cut_rows(
    ids: Sequence[int], *, rows: int, prompt_tokens: int, forced_tokens: int
) -> list[Forced]:
    """Rows spread evenly over a text, without overlap.

    Raises:
      ConfigError: a count below 1.
      RequestError: the text is too short.
    """
    sizes = {"rows": rows, "prompt_tokens": prompt_tokens}
    for name, value in (sizes | {"forced_tokens": forced_tokens}).items():
        check_count(name, value)
    found = spread_rows(ids, rows, prompt_tokens, forced_tokens)
    return [Forced(list(row), prompt_tokens) for row in found]

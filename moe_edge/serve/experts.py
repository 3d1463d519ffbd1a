"""What `/experts` tells: which experts are used, who is in slots, what that moved."""

from typing import Any

import numpy as np

from moe_edge.core.checks import check_count
from moe_edge.model.router import Routing
from moe_edge.serve.driver import Driver, Stepped
from moe_edge.serve.observers import Observer

EVERY = 16  # steps; the choices of one of them are counted


class ExpertWatch(Observer):
    """Watches the engine of a driver; all calls belong to the engine's thread.

    Choices are data of the device. In one step of so many they are kept until its end,
    when the device has them ready, and counted then; other steps are not touched.

    Args:
      every: steps from one that is counted to the next; the first one is.
    """

    def __init__(self, every: int = EVERY):
        check_count("every", every)
        self._every, self._steps, self._sampled = every, 0, 0
        self._seen: list[tuple[int, Routing]] = []
        self._is_due = True

    def ready(self, driver: Driver) -> None:
        """The driver is there, warmed up; its first step is to come."""
        config = driver.slots.engine.config
        self._used_LE = np.zeros((config.num_layers, config.moe.num_experts), np.int64)
        driver.slots.on_routing = self._see

    def _see(self, layer: int, routing: Routing) -> None:
        self._seen.append((layer, routing))

    def stepped(self, driver: Driver, stepped: Stepped) -> None:
        """A step is over; one that failed is not counted."""
        seen, self._seen = self._seen, []
        if seen and stepped.error is None:
            self._sampled += 1
            for layer, routing in seen:
                self._used_LE[layer] += self._count(np.asarray(routing.ids_TK))
        self._steps += 1
        # The next step may have begun already, unseen: then the one after it.
        self._is_due = self._steps % self._every == 0 or (self._is_due and not seen)
        driver.slots.on_routing = self._see if self._is_due else None

    def _count(self, ids_TK: np.ndarray) -> np.ndarray:
        """How often each expert was chosen, int64 `[E]`; id E is nobody."""
        E = self._used_LE.shape[1]
        return np.bincount(ids_TK.ravel(), minlength=E + 1)[:E]

    def report(self, driver: Driver) -> dict[str, Any]:
        """The answer of `/experts`, ready for JSON.

        Of each MoE layer: `slots` that may hold its experts; those who are `resident`;
        how many tokens `used` each expert, in the steps that were counted; `hits` and
        `misses` of all steps of running rows. Bytes are of all steps, prompts' too.
        """
        engine = driver.slots.engine
        config, state = engine.config, engine.expert_state()
        return {
            "mode": state.mode,
            "k": config.moe.top_k,
            "layers": [
                {
                    "layer": layer,
                    "slots": state.slots_L[layer],
                    "resident": np.flatnonzero(state.resident_LE[layer]).tolist(),
                    "used": self._used_LE[layer].tolist(),
                    **_lookups(*state.lookups[True][layer].tolist()),
                }
                for layer in config.moe_layers
            ],
            "bytes": {
                "demand": state.demand_bytes,
                "prefetch": state.prefetch_bytes,
                "wasted": state.wasted_bytes,
            },
            "prediction": state.prediction,
            "sampled_steps": self._sampled,
        }


def _lookups(hits: int, misses: int) -> dict[str, Any]:
    ratio = hits / (hits + misses) if hits + misses else None
    return {"hits": hits, "misses": misses, "hit_ratio": ratio}

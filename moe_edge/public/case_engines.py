"""The engines of the cases of `compare`: together, or one at a time.

Rounds turn the order of the cases, so that each is measured under the same drift of the
machine. Engines that are alive together are made and warmed up once. Where their slots
do not fit the device together, a case's engine is made anew for each of its turns.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_edge.engine.device_memory import free_device_bytes
from moe_edge.engine.devices import SPARE_SHARE
from moe_edge.offload.budget import parse_budget, share_of_blocks
from moe_edge.public.engine import Engine
from moe_edge.public.model import Model


class CaseEngines:
    """Engines by the number of their case.

    Args:
      cases: budget and options of each, as `Model.offload` takes them.
      warm_up: is called with a case and its new engine, before it is measured.
    Attributes:
      together: whether all are alive at once; None: no engine has been made.
    """

    def __init__(
        self,
        model: Model,
        cases: Sequence[tuple[str | float, Mapping[str, Any]]],
        warm_up: Callable[[int, Engine], None],
    ):
        self._model, self._cases, self._warm_up = model, cases, warm_up
        self._alive: dict[int, Engine] = {}
        self.together: bool | None = None

    def __enter__(self) -> "CaseEngines":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def __getitem__(self, case: int) -> Engine:
        """The engine of a case, which was warmed up. It lives until another one is
        asked for, or all end."""
        if case not in self._alive:
            if not self.together:
                self._close()
            budget, options = self._cases[case]
            if budget == "auto":  # cases are what they are told: no plan
                budget = self._model._auto_memory(options.get("memory"))
            engine = self._alive[case] = self._model.offload(budget, **options)
            if self.together is None:
                self.together = self._fit_beside(case)
            self._warm_up(case, engine)
        return self._alive[case]

    def _close(self) -> None:
        while self._alive:
            self._alive.popitem()[1].close()

    def _fit_beside(self, first: int) -> bool:
        """Whether the slots of all others fit the device beside the first case's."""
        others = [budget for i, (budget, _) in enumerate(self._cases) if i != first]
        if not others:
            return True
        free_bytes = free_device_bytes()
        if "auto" in others:  # all that is free
            return False
        needed_bytes = sum(map(self._slot_bytes, others))
        return free_bytes is None or needed_bytes <= free_bytes * (1 - SPARE_SHARE)

    def _slot_bytes(self, device_memory: str | float) -> int:
        """At most, of an engine; a size counts dense weights, too, which are shared."""
        config, budget = self._model.config, parse_budget(device_memory)
        if budget.share is None:
            return budget.bytes or 0
        blocks = len(config.moe_layers) * config.moe.num_experts
        slots = share_of_blocks(budget.share, blocks)
        return slots * (self._model.expert_bytes or 0)

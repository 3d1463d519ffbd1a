"""What is asked of an engine, and the form of the rules that refuse it (`refusals`)."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from moe_edge.model.config import ModelConfig
from moe_edge.offload.evict_base import EVICTIONS
from moe_edge.predict.base import PREDICTORS, Predictor
from moe_edge.route.base import get_route


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to work together, as far as it is known.

    Attributes:
      options: `OffloadOptions`; None: resident, or an engine that is there already.
      model: of the checkpoint.
      devices: that hold experts.
      recorded: whether a trace or events are wanted.
      eviction, predictor, route: classes, or objects of an engine that is there.
      is_assisted: whether the host computes experts.
      has_rows: whether rows join and leave.
      deterministic: whether a row's bits may not depend on the others.
    """

    options: Any = None
    model: ModelConfig | None = None
    devices: int = 1
    recorded: bool = False
    eviction: Any = None
    predictor: Any = None
    route: Any = None
    is_assisted: bool = False
    has_rows: bool = False
    deterministic: bool = False

    @classmethod
    def of(cls, options: Any, **more: Any) -> "Asked":
        """What an engine with these options would be asked."""
        return cls(
            options=options,
            eviction=EVICTIONS.class_of(options.eviction),
            predictor=PREDICTORS.class_of(options.predictor),
            route=get_route(options.route, **options.route_options),
            is_assisted=options.assist is not None,
            **more,
        )

    @property
    def is_fused(self) -> bool:
        """Whether mode fused was asked for by name."""
        return self.options is not None and self.options.mode == "fused"

    @property
    def predicts(self) -> bool:
        """Whether something is prefetched."""
        kind = self.predictor
        kind = kind if kind is None or isinstance(kind, type) else type(kind)
        return kind not in (None, Predictor)


class Rule(NamedTuple):
    """Two things that do not go together.

    Attributes:
      one, other: what they are, as documentation says it.
      remedy: what to do.
      fault: says of what is asked why it is refused; None: it is not.
    """

    one: str
    other: str
    remedy: str
    fault: Callable[[Asked], str | None]

    @property
    def name(self) -> str:
        return self.fault.__name__


def rules_of(table: list[Rule]):
    """A decorator by which a function that says a fault becomes a table's last rule."""

    def rule(one: str, other: str, remedy: str):
        def add(fault):
            table.append(Rule(one, other, remedy, fault))
            return fault

        return add

    return rule

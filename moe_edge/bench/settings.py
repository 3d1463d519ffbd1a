"""Settings of a study check themselves: a rule by type, or by name where one has it."""

import collections.abc
import dataclasses
import typing
from typing import Any

from moe_edge.core.checks import (
    ConfigError,
    check_count,
    check_from_zero,
    check_positive,
)
from moe_edge.engine.offload_options import OffloadOptions

Rules = collections.abc.Mapping[str, collections.abc.Callable[[str, Any], None]]


def check_steps(name: str, value: int) -> None:
    """Raises ConfigError for less than one decode step."""
    if value < 2:
        raise ConfigError(f"{name} is {value}, expected at least 2: one decode step")


def check_margin(name: str, value: float) -> None:
    """Raises ConfigError unless SMoE's margin lies in [0, 1)."""
    if not 0 <= value < 1:
        raise ConfigError(f"{name} must lie in [0, 1), got {value}")


def check_budget(name: str, value: str) -> None:
    """Raises ConfigError for what is no device memory."""
    OffloadOptions(device_memory=value)


RULES = {
    "a": check_margin,
    "a_values": check_margin,
    "budgets": check_budget,
    "device_memory": check_budget,
    "link_factor": check_positive,
    "link_latency_s": check_from_zero,
    "new_tokens": check_steps,
    "seed": check_from_zero,
    "tpot_budget_s": check_positive,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudySettings:
    """Base of settings: whole numbers are 1 or more, lists are not empty.

    `rules` has the checks of fields by name; a list's are made on each item.

    Raises:
      ConfigError: names the field, what it is and what was expected.
    """

    rules: typing.ClassVar[Rules] = RULES

    def __post_init__(self):
        for field in dataclasses.fields(self):
            check_field(field.name, field.type, getattr(self, field.name), self.rules)


def check_field(name: str, kind: Any, value: Any, rules: Rules) -> None:
    """Refuses a value that no study could run with."""
    if typing.get_origin(kind) is collections.abc.Sequence:
        if isinstance(value, str) or not len(value):
            raise ConfigError(f"{name} is {value!r}, expected a list of at least one")
        for item in value:
            check_field(name, *typing.get_args(kind), item, rules)
    elif value is None:
        return
    elif name in rules:
        rules[name](name, value)
    elif kind is int:
        check_count(name, value)

"""Settings of a study: one dataclass, composed of parts, whose types say what holds.

A part is what some functions read: prompts, a link, seeds. A study's dataclass has its
parts as bases, so that all fields lie flat, as gin, flags and entries name them, and
adds its own. What a value may be stands in the type of its field.
"""

import collections.abc
import dataclasses
import types
import typing
from collections.abc import Callable, Collection
from typing import Annotated, Any

from moe_edge.core.checks import (
    ConfigError,
    check_count,
    check_from_zero,
    check_known,
    check_positive,
)
from moe_edge.engine.offload_options import OffloadOptions


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


def check_share(name: str, value: float) -> None:
    """Raises ConfigError unless the value is a share."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} must lie in [0, 1], got {value}")


def known(kind: str, names: Collection[str]) -> Callable[[str, str], None]:
    """The check that a value is one of these names; `kind`: what they are of."""
    return lambda _, value: check_known(kind, value, names)


def by(parse: Callable[[Any], Any]) -> Callable[[str, Any], None]:
    """The check that a function takes a value."""
    return lambda _, value: parse(value)


Positive = Annotated[float, check_positive]
FromZero = Annotated[float, check_from_zero]
Share = Annotated[float, check_share]
Seed = Annotated[int, check_from_zero]
Steps = Annotated[int, check_steps]
Margin = Annotated[float, check_margin]
Budget = Annotated[str, check_budget]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudySettings:
    """Base of settings: whole numbers are 1 or more, lists are not empty, and what
    `Annotated` adds to a type is called with a field's name and value.

    Raises:
      ConfigError: names the field, what it is and what was expected.
    """

    def __post_init__(self):
        for field in dataclasses.fields(self):
            check_field(field.name, field.type, getattr(self, field.name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seeds(StudySettings):
    """What is repeated with other seeds.

    Attributes:
      seed, seeds: the first one and how many; rows are medians over them.
    """

    seed: Seed = 0
    seeds: int = 5

    @property
    def all_seeds(self) -> list[int]:
        return list(range(self.seed, self.seed + self.seeds))


def check_field(name: str, kind: Any, value: Any) -> None:
    """Refuses a value that no study could run with."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is not None:
            check_field(name, args[0], value)
    elif origin is Annotated:
        args[1](name, value)
    elif origin is collections.abc.Sequence:
        if isinstance(value, str) or not len(value):
            raise ConfigError(f"{name} is {value!r}, expected a list of at least one")
        for item in value:
            check_field(name, args[0], item)
    elif origin is tuple and args[1:] == (...,):
        for item in value:
            check_field(name, args[0], item)
    elif kind is int:
        check_count(name, value)

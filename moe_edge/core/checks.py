"""Errors of the library and the checks made at its borders.

Every error says what was wrong, what was found, what was expected and what to
do about it. All are ValueErrors, so a caller may catch them without importing us.
"""

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np


class MoeEdgeError(ValueError):
    """Base of every error this library raises on bad input."""


class ConfigError(MoeEdgeError):
    """A model config, flag or gin binding that cannot be honoured."""


class CheckpointError(MoeEdgeError):
    """A checkpoint that is damaged, incomplete or of an unknown kind."""


class CapacityError(MoeEdgeError):
    """A budget (memory, context, slots) that is too small for the request."""


class RequestError(MoeEdgeError):
    """A prompt or request that cannot be served."""


class OutputError(MoeEdgeError):
    """An output folder that exists already or cannot be written."""


def check_shape(name: str, array, expected: tuple) -> None:
    """Raises ConfigError unless `array.shape` is `expected` (None = any size)."""
    shape = tuple(array.shape)
    fits = len(shape) == len(expected) and all(
        want is None or got == want for got, want in zip(shape, expected, strict=True)
    )
    if not fits:
        raise ConfigError(f"{name} has shape {shape}, expected {expected}")


def check_positive(name: str, value: float) -> None:
    """Raises ConfigError unless value is a finite number above 0."""
    if not value > 0:
        raise ConfigError(f"{name} must be positive, got {value}")
    if value == math.inf:
        raise ConfigError(f"{name} must be finite, got {value}")


def check_from_zero(name: str, value: float) -> None:
    """Raises ConfigError unless value is a finite number, 0 or more."""
    if not 0 <= value < math.inf:
        raise ConfigError(f"{name} must be 0 or more and finite, got {value}")


def check_count(name: str, value: int) -> None:
    """Raises ConfigError unless value is a whole number above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{name} must be a positive whole number, got {value!r}")


def check_divides(name: str, value: int, unit: str, total: int) -> None:
    """Raises ConfigError unless `total` splits into `value` equal parts.

    Args:
      name: of the setting, for the message.
      unit: what `total` counts.
    """
    if value < 1 or total % value:
        divisors = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
        raise ConfigError(
            f"{total} {unit} do not split into {value} equal {name}; divisors are "
            f"{divisors}"
        )


def check_known(kind: str, name: str, known) -> None:
    """Raises ConfigError if `name` is not in `known`, listing what is."""
    if name not in known:
        raise ConfigError(f"unknown {kind} {name!r}; known: {', '.join(sorted(known))}")


def build_known(kind: str, classes, name: str, options):
    """An object of the dataclass called `name`, with these options.

    Args:
      kind: what it is, for the message.
      classes: name -> dataclass.
    Raises:
      ConfigError: unknown name or option, listing what is; an option of another type;
        or what the class refuses.
    """
    check_known(kind, name, classes)
    check_options(name, classes[name], options)
    return classes[name](**options)


def check_options(name: str, kind: type, options: Mapping[str, Any]) -> None:
    """Raises ConfigError for options that a dataclass lacks, or of another type.

    Args:
      name: of the thing, for the message.
    """
    kinds = {field.name: field.type for field in dataclasses.fields(kind) if field.init}
    for option, value in options.items():
        if option not in kinds:
            known = ", ".join(kinds) or "none"
            raise ConfigError(f"{name} has no option {option!r}; known: {known}")
        if not _is_of(value, kinds[option]):
            kind = getattr(kinds[option], "__name__", kinds[option])
            raise ConfigError(f"{name}: {option} is {value!r}, expected {kind}")


def _is_of(value, kind) -> bool:
    """Whether a value is of an annotated type; True where that cannot be told."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(kind, str):
        return True
    if isinstance(value, bool) and bool not in (kind, *typing.get_args(kind)):
        return kind in (object, Any)
    try:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return isinstance(value, kind) or (is_whole and isinstance(1.0, kind))
    except TypeError:  # a type with parameters
        return True

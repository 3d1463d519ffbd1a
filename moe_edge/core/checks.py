"""Errors of the library and the checks made at its borders.

Every error says what was wrong, what was found, what was expected and what to
do about it. All are ValueErrors, so a caller may catch them without importing us.
"""

import dataclasses
import math


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
    """Raises ConfigError unless value > 0."""
    if not value > 0:
        raise ConfigError(f"{name} must be positive, got {value}")


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
      ConfigError: unknown name or option, listing what is; or what the class refuses.
    """
    check_known(kind, name, classes)
    fields = [field.name for field in dataclasses.fields(classes[name])]
    for option in options:
        if option not in fields:
            known = ", ".join(fields) or "none"
            raise ConfigError(f"{name} has no option {option!r}; known: {known}")
    return classes[name](**options)

"""Errors of the library and the checks made at its borders.

Every error says what was wrong, what was found, what was expected and what to
do about it. All are ValueErrors, so a caller may catch them without importing us.
"""

import math
import os

import numpy as np

from moe_edge.core.suggest import unknown


class MoeEdgeError(ValueError):
    """Base of every error this library raises on bad input.

    >>> try:
    ...     model.offload("1%", slot_plan="equal")
    ... except me.MoeEdgeError as error:
    ...     print(error)  # doctest: +ELLIPSIS
    device memory of 1% holds 3 slots of 73728 bytes; the minimum is 12 slots ...

    Attributes:
      exit_code: of a script that ends by it.
    """

    exit_code = 2


class ConfigError(MoeEdgeError):
    """A model config, argument, flag or gin binding that cannot be honoured.

    >>> model.offload("25%", eviction="lruu")
    Traceback (most recent call last):
    ...
    moe_edge.core.checks.ConfigError: unknown eviction policy 'lruu'; did you ...
    """


class CheckpointError(MoeEdgeError):
    """A checkpoint that is damaged, incomplete or of an unknown kind.

    >>> me.load("no/such/folder")
    Traceback (most recent call last):
    ...
    moe_edge.core.checks.CheckpointError: checkpoint no/such/folder is not ...
    """


class CapacityError(MoeEdgeError):
    """A budget (memory, context, slots) that is too small for the request.

    >>> engine.generate("Once upon a time", max_new_tokens=5000)
    Traceback (most recent call last):
    ...
    moe_edge.core.checks.CapacityError: prompt and new tokens are up to 5004 ...
    """


class RequestError(MoeEdgeError):
    """A prompt or request that cannot be served.

    >>> engine.generate([1, 2.5])
    Traceback (most recent call last):
    ...
    moe_edge.core.checks.RequestError: prompt 0...
    """


class OutputError(MoeEdgeError):
    """An output folder or file that exists already or cannot be written.

    >>> row = {"budget": "25%", "eviction": "lru", "predictor": "", "route": ""}
    >>> row |= {"hit_ratio": 0.5, "tokens_per_s": 9.0}
    >>> row |= {"tokens_per_s_low": 8.0, "tokens_per_s_high": 9.0}
    >>> me.plot(pandas.DataFrame([row]), "no/such/folder/a.png")
    Traceback (most recent call last):
    ...
    moe_edge.core.checks.OutputError: output file no/such/folder/a.png: folder ...
    """


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
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or value <= 0:
        raise ConfigError(f"{name} must be a positive whole number, got {value!r}")


def one_or_each(name: str, value, servers: int) -> np.ndarray:
    """float64 [servers] of one number for all servers or one each, else ConfigError."""
    try:
        given = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        given = np.asarray(math.nan)
    if np.isnan(given).any():
        raise ConfigError(f"{name} is {value!r}, expected one number or one a server")
    if given.shape not in ((), (servers,)):
        raise ConfigError(
            f"{name} has {given.size} numbers for {servers} servers; give one or each"
        )
    return np.broadcast_to(given, servers)


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
    """Raises ConfigError if `name` is not in `known`: the nearest, then all."""
    if name not in known:
        raise ConfigError(unknown(kind, name, known))


def chosen(kind: str, text: str, known) -> list[str] | None:
    """Names separated by commas, each once, checked as above; None for `all`."""
    if text == "all":
        return None
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        check_known(kind, name, known)
    return names


def check_cores(text: str | None, processes: int) -> list[set[int]] | None:
    """Cores of each process from `0,1,0-1`; None where nothing was said.

    Raises:
      ConfigError: another form or number, or a core that this machine lacks.
    """
    if text is None:
        return None
    groups, there = [], os.cpu_count() or 1
    for part in text.split(","):
        first, _, last = part.partition("-")
        ends = first, last or first
        if not all(end.isascii() and end.isdigit() for end in ends):
            raise ConfigError(f"cores is {text!r}, expected such as 0,1,0-1")
        group = set(range(int(ends[0]), int(ends[1]) + 1))
        if not group or max(group) >= there:
            raise ConfigError(f"cores {part!r}: this machine has 0 to {there - 1}")
        groups.append(group)
    if len(groups) != processes:
        raise ConfigError(
            f"cores names {len(groups)} processes, expected {processes}: the scheduler "
            "first"
        )
    return groups

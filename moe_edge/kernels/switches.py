"""Environment variables that choose between kernels."""

import os

from moe_edge.core.checks import check_known

OFF_ON = ("0", "1")


def chosen(variable: str, known: tuple[str, ...], default: str) -> str:
    """What the variable says.

    Raises:
      ConfigError: a value that is not known.
    """
    value = os.environ.get(variable, default)
    check_known(variable, value, known)
    return value

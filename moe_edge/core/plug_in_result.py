"""What a method of another author's plug-in gave back, refused by name.

Our own classes are not asked: their tests know what they return.
"""

from typing import Any

import numpy as np

from moe_edge.core.checks import ConfigError


def wrong_result(what: str, method: str, got: Any, expected: str) -> ConfigError:
    """The error to raise: which plug-in and method, what it gave, what was expected.

    >>> str(wrong_result("assist mine", "take", None, "a list of expert ids"))
    'assist mine: take gave None, expected a list of expert ids'

    Args:
      what: the kind and name of the plug-in.
    """
    return ConfigError(f"{what}: {method} gave {got!r:.120}, expected {expected}")


def kind_of(array: Any) -> str | None:
    """The kind of a NumPy or JAX array's numbers: b, i, u, f; None: it is no array.

    What NumPy does not know itself (bfloat16) is f, as JAX sees it.
    """
    dtype = getattr(array, "dtype", None)
    if dtype is None or not hasattr(array, "shape"):
        return None
    kind = np.dtype(dtype).kind
    return "f" if kind == "V" else kind


def is_whole(value: Any) -> bool:
    """Whether this is one whole number, of Python or NumPy; True and False are not."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)

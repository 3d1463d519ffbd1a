"""Options of cases that are refused because they would have no effect."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.core.checks import ConfigError, check_count, check_positive

DEFAULT_INTERVAL_S = 10.0  # Prism, section IV-A
Given = Mapping[str, tuple[Any, Any]]  # option -> what it is, what it is if not given


def check_arrivals(
    arrivals: str,
    *,
    interval_s: float | Sequence[float] | None,
    for_traces: Given,
    for_poisson: Given,
) -> float | Sequence[float]:
    """Checks the options of arrivals.

    Args:
      arrivals: "poisson" or the name of a trace.
      interval_s: mean gap of Poisson arrivals.
      for_traces, for_poisson: what else only one of them heeds.
    Returns:
      The mean gap, with its default; of a trace, whose requests are spread evenly, the
      same for all servers.
    Raises:
      ConfigError: an option out of range, or of the other kind of arrivals.
    """
    most_tokens = for_traces["most_tokens"][0]
    if most_tokens is not None:
        check_count("most_tokens", most_tokens)
    if arrivals != "poisson":
        idle = {"interval_s": (interval_s, None), **for_poisson}
        refuse_idle(idle, f"arrivals of {arrivals}", "Poisson arrivals")
    else:
        refuse_idle(for_traces, "Poisson arrivals", "a trace")
    if interval_s is None:
        return DEFAULT_INTERVAL_S
    for each_s in np.atleast_1d(interval_s).tolist():
        check_positive("arrival interval_s", each_s)
    return interval_s


def refuse_idle(given: Given, case: str, needs: str) -> None:
    """Refuses options that would be ignored.

    Args:
      given: values of options and their defaults.
      case: in which they are ignored.
      needs: what they belong to.
    Raises:
      ConfigError: one was set.
    """
    names = [name for name, (value, default) in given.items() if value != default]
    if names:
        raise ConfigError(
            f"{', '.join(names)} would have no effect with {case}, only with {needs}; "
            "drop one of them"
        )

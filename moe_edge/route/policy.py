"""Route policies by name."""

import dataclasses

from moe_edge.core.checks import ConfigError, check_known
from moe_edge.route.base import RoutePolicy
from moe_edge.route.drop import DropAbsent
from moe_edge.route.substitute import Substitute
from moe_edge.route.topk import TopK

__all__ = ["ROUTES", "RoutePolicy", "get_route"]

ROUTES = {cls.name: cls for cls in (TopK, Substitute, DropAbsent)}


def get_route(name: str, **options) -> RoutePolicy:
    """The route policy called `name`.

    Raises:
      ConfigError: unknown name or option (the known ones are listed), or a bad value.
    """
    check_known("route policy", name, ROUTES)
    fields = [field.name for field in dataclasses.fields(ROUTES[name])]
    for option in options:
        if option not in fields:
            known = ", ".join(fields) or "none"
            raise ConfigError(f"{name} has no option {option!r}; known: {known}")
    return ROUTES[name](**options)

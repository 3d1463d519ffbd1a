"""Route policies by name."""

from moe_edge.core.checks import build_known
from moe_edge.route.base import RoutePolicy, TopK
from moe_edge.route.drop import DropAbsent
from moe_edge.route.substitute import Substitute

__all__ = ["ROUTES", "RoutePolicy", "get_route"]

ROUTES = {cls.name: cls for cls in (TopK, Substitute, DropAbsent)}


def get_route(name: str, **options) -> RoutePolicy:
    """The route policy called `name`.

    Raises:
      ConfigError: unknown name or option (the known ones are listed), or a bad value.
    """
    return build_known("route policy", ROUTES, name, options)

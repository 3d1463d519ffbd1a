"""Route policies by name."""

from moe_edge.core.plug_in import Registry
from moe_edge.route.base import RoutePolicy, TopK
from moe_edge.route.drop import DropAbsent
from moe_edge.route.substitute import Substitute

__all__ = ["ROUTES", "ROUTE_KINDS", "RoutePolicy", "get_route"]

ROUTES = {cls.name: cls for cls in (TopK, Substitute, DropAbsent)}
ROUTE_KINDS = Registry("route policy", RoutePolicy, ROUTES, "route_options")


def get_route(route: str | type | RoutePolicy, **options) -> RoutePolicy:
    """The route policy of a name, a class, or an object.

    Raises:
      ConfigError: unknown name or option (the known ones are listed), or a bad value.
    """
    return ROUTE_KINDS.make(route, options)

"""Placers by name. Their shared interface is placer.Placer."""

from moe_edge.core.checks import build_known
from moe_edge.place.baselines import Redundance, SmartMoe, Uniform
from moe_edge.place.eplb import Eplb, EplbHeterogeneous
from moe_edge.place.greedy import Greedy
from moe_edge.place.latency_aware import LatencyAware
from moe_edge.place.optimal import Optimal
from moe_edge.place.placer import Placer
from moe_edge.place.prism import Prism

PLACERS = {
    cls.name: cls
    for cls in (
        Uniform,
        Redundance,
        SmartMoe,
        Eplb,
        EplbHeterogeneous,
        Prism,
        Greedy,
        Optimal,
        LatencyAware,
    )
}

# Servers that load what they lack from their own memory and ask nobody: name -> whether
# busy ones pass requests on to idle ones (Prism, table I).
ALONE = {"moe_infinity": False, "moe_infinity_lb": True}
METHODS = (*PLACERS, *ALONE)


def get_placer(name: str, **options) -> Placer:
    """The placer called `name`.

    Raises:
      ConfigError: unknown name or option (the known ones are listed), or a bad value.
    """
    return build_known("placer", PLACERS, name, options)

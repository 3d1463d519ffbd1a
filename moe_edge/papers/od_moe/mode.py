"""OD-MoE as a way to run a cluster; loads no JAX."""

from moe_edge.cluster.modes import Mode
from moe_edge.cluster.options import ClusterOptions
from moe_edge.core.checks import (
    ConfigError,
    check_count,
    check_from_zero,
    check_known,
    check_positive,
)
from moe_edge.papers.od_moe.shadow.predictor import PRECISIONS

DEPARTURES = ("late", "speculative")
BALANCED = "balanced"


def check(options: ClusterOptions) -> None:
    """Raises ConfigError for workers, shadows and loads that cannot be."""
    check_known("shadow", options.shadow, (*PRECISIONS, "random", "none"))
    check_known("departure", options.departure, DEPARTURES)
    for name in ("workers", "groups", "worker_layers"):
        check_count(name, getattr(options, name))
    for name in ("token_period", "kv_period"):
        check_from_zero(name, getattr(options, name))
    if options.mode == "od_moe" and not options.chosen_route.lossless:
        raise ConfigError(
            f"route {options.route} prefers experts that are in slots, and workers of "
            "od_moe load each expert for the token that chose it; use route topk, or "
            "mode prism"
        )
    if options.workers % options.groups:
        raise ConfigError(
            f"--groups {options.groups} does not divide --workers {options.workers}; "
            "groups are of equal size"
        )
    if options.load_bytes_per_s != BALANCED:
        try:
            check_positive("load_bytes_per_s", float(options.load_bytes_per_s))
        except ValueError as error:
            raise ConfigError(
                f"--load_bytes_per_s is {options.load_bytes_per_s!r}, expected a "
                f"positive number or {BALANCED}"
            ) from error


def make_node(number, options, transport, reader):
    from moe_edge.papers.od_moe.cluster import nodes

    return nodes.make_node(number, options, transport, nodes.Parts(reader))


def programme() -> type:
    from moe_edge.papers.od_moe.cluster.programme import OdProgramme

    return OdProgramme


MODE = Mode(check, make_node, programme)

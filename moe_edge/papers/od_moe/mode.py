"""OD-MoE as a way to run a cluster; loads no JAX."""

from moe_edge.cluster.modes import Mode
from moe_edge.papers.od_moe.options import OdMoeOptions


def make_node(number, options, transport, reader):
    from moe_edge.papers.od_moe.cluster import nodes

    return nodes.make_node(number, options, transport, nodes.Parts(reader))


def programme() -> type:
    from moe_edge.papers.od_moe.cluster.programme import OdProgramme

    return OdProgramme


MODE = Mode(OdMoeOptions, make_node, programme)

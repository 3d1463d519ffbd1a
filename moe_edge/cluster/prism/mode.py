"""Servers that ask each other as a way to run a cluster; loads no JAX."""

from moe_edge.cluster.modes import Mode
from moe_edge.cluster.prism_options import PrismOptions


def make_node(number, options, transport, reader):
    from moe_edge.cluster.prism.server import make_server

    return make_server(number, options, transport, reader)


def programme() -> type:
    from moe_edge.cluster.prism.programme import PrismProgramme

    return PrismProgramme


def check(options, config):
    from moe_edge.cluster.prism import model_checks

    return model_checks.check(options, config)


MODE = Mode(PrismOptions, make_node, programme, check)

"""One process of a cluster that serves over HTTP: scheduler, front or holder.

    python -m moe_edge.serve.cluster_process SPEC.json NUMBER

As `moe_edge.cluster.process`, with other servers and another scheduler.
"""

import sys

from moe_edge.cluster.model_checks import open_at_k
from moe_edge.cluster.prism.server import Server, make_server
from moe_edge.cluster.process import end, main
from moe_edge.cluster.roles import FIRST
from moe_edge.cluster.spec import Spec
from moe_edge.cluster.transport.messages.transport import Transport
from moe_edge.serve.cluster_programme import ServedProgramme
from moe_edge.serve.cluster_run import Cluster
from moe_edge.serve.cluster_server import Front, Holder


def make_node(spec: Spec, number: int, transport: Transport) -> Server:
    """Server 0 answers clients, the others hold experts."""
    cluster = Cluster.of(spec)
    reader = open_at_k(spec.options)
    kind = Front if number == FIRST else Holder
    node = make_server(number, spec.options, transport, reader, kind)
    node.serves(cluster, spec.folder)
    return node


if __name__ == "__main__":
    end(main(sys.argv[1:], make_node, lambda _: ServedProgramme))

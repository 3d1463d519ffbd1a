"""Serving by several processes: starts them, passes signals on, ends them all.

Server 0 answers clients. Nothing computes here, and no device is taken.
"""

import contextlib
import dataclasses
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_edge.cluster.gpus import gpu_environments
from moe_edge.cluster.model_checks import check_model
from moe_edge.cluster.node.membership import free_port
from moe_edge.cluster.prism_options import ServedOptions
from moe_edge.cluster.roles import FIRST, SCHEDULER
from moe_edge.cluster.run import LOCAL, shared_secret
from moe_edge.cluster.spec import Spec
from moe_edge.cluster.supervisor import Processes
from moe_edge.core.json_reader import read_json
from moe_edge.core.progress import waiting
from moe_edge.engine.refusals import Asked, refuse
from moe_edge.serve.options import ServingOptions, cache_bytes_of
from moe_edge.serve.server_options import ServerOptions
from moe_edge.serve.service import SIGNALS, listen

READY, SUMMARY = "ready", "summary.json"  # in the folder of the processes


@dataclasses.dataclass(frozen=True)
class Cluster:
    """What servers must know to serve together.

    Attributes:
      given: of `PrismOptions`: checkpoint, k, servers, slots, route and caches.
    """

    given: dict[str, Any]
    serving: ServingOptions
    server: ServerOptions

    @property
    def stored(self) -> dict:
        """As a `Spec` holds it."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, spec: Spec) -> "Cluster":
        """Read from a `Spec`."""
        stored = dict(spec.served)
        stored["serving"] = ServingOptions(**stored["serving"])
        stored["server"] = ServerOptions(**stored["server"])
        return cls(**stored)


def serve_cluster(cluster: Cluster, reader, dry_run: bool) -> dict[str, Any]:
    """Serves until a signal; the summary of server 0.

    Args:
      reader: the open checkpoint, at the cluster's K.
    Raises:
      MoeEdgeError: bad input, or server 0, the scheduler or all holders are lost
        (exit code 3).
    """
    from moe_edge.engine.slot_programs import SlotShapes

    options, serving = ServedOptions(**cluster.given), cluster.serving
    serving.check_named("servers in processes of their own know names alone")
    check_model(options, reader)
    route, equal_bits = options.chosen_route, serving.deterministic
    refuse(Asked(route=route, has_rows=True, deterministic=equal_bits))
    sizes = serving.sizes(serving.context(reader.config.max_positions))
    cache_bytes_of(serving, SlotShapes(reader.config, **sizes))
    listen(cluster.server.host, cluster.server.port).close()
    if dry_run:
        return {"dry_run": True}
    with shared_secret(options) as secret, tempfile.TemporaryDirectory() as work:
        folder, spec_file = Path(work), Path(work) / "spec.json"
        spec = Spec(
            options=options,
            folder=work,
            secret=str(secret),
            hosts=dict.fromkeys(range(options.processes), LOCAL),
            coordinator=f"{LOCAL}:{free_port(LOCAL)}",
            parent=os.getpid(),
            served=cluster.stored,
        )
        spec.save(spec_file)
        how = {"module": "moe_edge.serve.cluster_process", "speaks": FIRST}
        how["own"] = gpu_environments(options, [*spec.hosts], os.environ)
        how["shown"] = SCHEDULER, FIRST
        with Processes(spec_file, options, folder, {}, **how) as processes:
            with _signals_to(processes, folder / READY):
                processes.start([*spec.hosts])
                with waiting(once=(folder / READY).exists):
                    processes.watch()
        return read_json(folder / SUMMARY, strict=False)


@contextlib.contextmanager
def _signals_to(processes: Processes, ready: Path) -> Iterator[None]:
    """Signals go to server 0, once it serves; until then they mean what they did.

    As with `run_until_signal` they are ignored in the end, if one has come.
    """
    before, told = {number: signal.getsignal(number) for number in SIGNALS}, []

    def pass_on(number, frame) -> None:
        if ready.exists():
            told.append(number)
            processes.send(FIRST, signal.SIGTERM)
        else:
            signal.signal(number, before[number])
            signal.raise_signal(number)

    for number in SIGNALS:
        signal.signal(number, pass_on)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if told else handler)

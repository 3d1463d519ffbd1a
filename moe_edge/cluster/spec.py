"""What the supervisor tells a process, and what a process says of itself."""

import dataclasses
import json
import os
from pathlib import Path

import jaxlib.version  # without JAX itself, which takes a second to load

from moe_edge.cluster.modes import options_of
from moe_edge.cluster.options import ClusterOptions
from moe_edge.cluster.prism_options import ServedOptions
from moe_edge.cluster.transport.base import Address
from moe_edge.cluster.transport.wire import WIRE_VERSION
from moe_edge.core.json_reader import read_json
from moe_edge.core.process import processor


@dataclasses.dataclass(frozen=True)
class Spec:
    """What the supervisor tells its processes.

    Attributes:
      options: of the cluster.
      folder: where the scheduler writes results.
      secret: path of the secret's file.
      hosts: of the processes started here, by number: the address to bind.
      coordinator: HOST:PORT of the scheduler.
      parent: pid of the supervisor.
      served: what server 0 must know to answer over HTTP; None: requests are given.
      content: of the checkpoint here, by `content_of`; empty where all processes are
        started here and read the same one.
    """

    options: ClusterOptions
    folder: str
    secret: str
    hosts: dict[int, str]
    coordinator: str
    parent: int
    served: dict | None = None
    content: dict[str, str] = dataclasses.field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        stored = dataclasses.asdict(self)
        Path(path).write_text(json.dumps(stored), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Spec":
        stored = read_json(path, strict=False)
        kind = options_of if stored["served"] is None else ServedOptions
        stored["options"] = kind(**stored["options"])
        stored["hosts"] = {int(n): host for n, host in stored["hosts"].items()}
        return cls(**stored)

    @property
    def address(self) -> Address:
        """Of the scheduler."""
        host, _, port = self.coordinator.rpartition(":")
        return Address(host, int(port), int(port))


def began_file(spec: str | Path, number: int) -> Path:
    """Beside the spec: there once a process is ready; its end is no refusal then."""
    return Path(spec).with_name(f"began{number}")


def facts_of(spec: Spec) -> dict:
    """What a process says of itself."""
    return {
        "wire": WIRE_VERSION,
        "content": spec.content,
        "options": spec.options.shared,
        "jaxlib": jaxlib.version.__version__,
        "processor": processor(),
        "instance": os.urandom(8).hex(),
    }

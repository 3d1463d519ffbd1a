"""Exit codes of a process, and the port that it takes."""

import os

import jax
import pytest

from moe_edge.cluster import process
from moe_edge.cluster.node.membership import BELOW_EPHEMERAL, free_port
from moe_edge.cluster.node.node import SchedulerLost
from moe_edge.cluster.prism_options import PrismOptions
from moe_edge.cluster.spec import Spec
from moe_edge.cluster.transport.base import Address
from moe_edge.core.checks import CapacityError


@pytest.mark.parametrize(
    "has_begun, error, code",
    [
        (False, CapacityError("too few slots"), 2),  # what it was given is bad
        (True, CapacityError("no slot is free"), 1),  # a fault of its own
        (True, SchedulerLost("it is dead"), 3),
    ],
)
def test_errors_of_a_server_that_runs_are_not_bad_input(
    has_begun, error, code, tmp_path, monkeypatch, capsys
):
    def run_node(spec, number, began, make_node):
        if has_begun:
            began.touch()
        raise error

    monkeypatch.setattr(process, "run_node", run_node)
    monkeypatch.setattr(process, "die_with_parent", lambda parent: None)
    options = PrismOptions(workload="words,words,words")
    where = {"folder": "", "secret": "", "hosts": {}, "coordinator": ""}
    path = tmp_path / "spec.json"
    Spec(options=options, parent=os.getpid(), **where).save(path)
    assert process.main([str(path), "1"]) == code
    assert capsys.readouterr().err == f"error: {error}\n"


class Joining:
    """A transport that is welcomed at once."""

    address = Address("127.0.0.1", 1, 2)
    peer, traffic, on_lost = 1, None, None

    def serve(self, lobby) -> None:
        lobby.welcome.put({"roster": []})


def test_a_process_joins_without_distributed_jax(monkeypatch):
    """Its coordinator would end all processes when one is lost, and open a port."""

    def initialize(*_, **__):
        raise AssertionError("jax.distributed was initialised")

    monkeypatch.setattr(process, "transport_of", lambda spec, number: Joining())
    monkeypatch.setattr(process, "say_hello", lambda *_: None)
    monkeypatch.setattr(process, "keep_heap", lambda: None)
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    options = PrismOptions(workload="words,words,words")
    where = {"folder": "", "secret": "", "hosts": {}, "coordinator": "127.0.0.1:1"}
    spec = Spec(options=options, parent=os.getpid(), **where)
    assert isinstance(process.join(spec, 1, process.Lobby()), Joining)


def test_a_free_port_is_none_that_a_connection_gets_by_chance():
    ports = {free_port("127.0.0.1") for _ in range(20)}
    assert min(ports) >= BELOW_EPHEMERAL[0] and max(ports) < BELOW_EPHEMERAL[1]
    with pytest.raises(OSError, match="address"):
        free_port("192.0.2.1")

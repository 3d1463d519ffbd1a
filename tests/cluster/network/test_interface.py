"""Bytes at a network interface: those of loopback rise by what is sent."""

import socket
import sys

import pytest

from moe_edge.cluster.network.interface import Interface, sent_bytes
from moe_edge.cluster.prism.outcome import interface_bytes

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net/dev")


@linux
def test_what_is_sent_is_counted_from_the_last_reset_on():
    interface = Interface("lo")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(10):
            sender.sendto(bytes(1000), ("127.0.0.1", 9))
    assert interface.sent >= 10_000
    interface.reset()
    assert interface.sent < 10_000_000  # not what was sent since the machine started


@linux
def test_an_unknown_interface_is_named():
    with pytest.raises(OSError, match="no network interface 'none_such'"):
        sent_bytes("none_such")


def test_without_an_interface_of_its_own_nothing_is_counted():
    interface = Interface()
    interface.reset()
    assert interface.sent is None
    assert interface_bytes([{"interface": 5}, {"interface": 7}]) == 12
    assert interface_bytes([{"interface": 5}, {"interface": None}]) is None
    assert interface_bytes([]) is None

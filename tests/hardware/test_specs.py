import dataclasses

import pytest

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.hardware.specs import Cluster, Device, Gpu, Link, Server

DEVICE = Device(
    name="d", memory_bytes=100, flops_per_s=2.0, memory_bytes_per_s=4.0, source="t"
)
LINK = Link(bytes_per_s=8.0, latency_s=0.5, source="t")


def cluster(**kwargs):
    one = Gpu(device=DEVICE, host_link=LINK)
    half = Gpu(device=DEVICE, host_link=LINK, expert_memory_bytes=50)
    servers = (Server(name="a", gpus=(one,)), Server(name="b", gpus=(half, one)))
    return Cluster(servers=servers, network=LINK, **kwargs)


def test_link_seconds_are_busy_time_and_latency():
    assert (LINK.busy_s(16), LINK.seconds(16)) == (2.0, 2.5)


def test_slots_are_whole_blocks_of_expert_memory():
    slots = cluster().slots(30)
    assert [s.tolist() for s in slots] == [[3], [1, 3]]


def test_links_can_differ_by_direction():
    slow = Link(bytes_per_s=1.0, source="t")
    built = cluster(links={(0, 1): slow})
    assert (built.link(0, 1), built.link(1, 0)) == (slow, LINK)
    assert built.num_servers == 2


def test_cluster_too_small_says_what_is_missing():
    cluster().check_holds(7, 30)
    with pytest.raises(CapacityError, match="holds 7 .* needs 9: 60 bytes"):
        cluster().check_holds(9, 30)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"memory_bytes": 0}, "d: memory_bytes must be positive, got 0"),
        ({"flops_per_s": float("nan")}, "flops_per_s must be positive, got nan"),
        ({"call_s": -1.0}, "call_s must be 0 or more and finite, got -1.0"),
    ],
)
def test_device_refuses(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(DEVICE, **change)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_link_rate_is_positive_and_may_be_infinite(rate):
    assert Link(bytes_per_s=float("inf"), source="t").busy_s(10) == 0
    with pytest.raises(ConfigError, match=f"bytes_per_s must be positive, got {rate}"):
        Link(bytes_per_s=rate, source="t")


def test_bad_parts_are_refused():
    with pytest.raises(
        ConfigError, match="latency_s must be 0 or more and finite, got inf"
    ):
        Link(bytes_per_s=1, latency_s=float("inf"), source="t")
    with pytest.raises(
        ConfigError, match="expert_memory_bytes is 101, expected 0 to 100"
    ):
        Gpu(device=DEVICE, host_link=LINK, expert_memory_bytes=101)
    with pytest.raises(ConfigError, match="server x has no GPU"):
        Server(name="x", gpus=())
    with pytest.raises(ConfigError, match="at least one server"):
        Cluster(servers=(), network=LINK)
    with pytest.raises(ConfigError, match=r"link \(0, 2\) joins no two of the 2"):
        cluster(links={(0, 2): LINK})
    with pytest.raises(ConfigError, match="unknown network sharing 'bus'"):
        cluster(sharing="bus")

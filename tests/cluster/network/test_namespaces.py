"""Emulated slow networks; these need root, ip, tc and tbf."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_edge.cluster.network import namespaces
from moe_edge.cluster.network.namespaces import emulated_network, missing_rights
from moe_edge.core.checks import ConfigError

PREFIX = f"moe-edge-test-{os.getpid()}"
ROOT = Path(__file__).parents[3]
HOLD = """
import sys, time
from moe_edge.cluster.network.namespaces import emulated_network
with emulated_network(["a", "b"], None, prefix=sys.argv[1]):
    print("ready", flush=True)
    time.sleep(60)
"""
reason = missing_rights()
needs_rights = pytest.mark.skipif(reason is not None, reason=f"no networks: {reason}")


def left(prefix=PREFIX):
    """Everything of a prefix that is there."""
    folders = (Path("/run/netns"), Path("/etc/netns"))
    return sorted(path.name for f in folders for path in f.glob(f"{prefix}*"))


@pytest.fixture
def holder():
    """A process that holds a network of the prefix."""
    words = [sys.executable, "-c", HOLD, PREFIX]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@needs_rights
def test_nodes_reach_each_other_by_name_at_the_rate(monkeypatch):
    monkeypatch.setattr(namespaces, "TOLERANCE", 9.0)  # other tests keep the cores busy
    with emulated_network(["scheduler", "server0"], 60.0, prefix=PREFIX) as network:
        assert len(left()) == 5  # two nodes, a switch, two files of hosts
        assert network.ideal_s == pytest.approx(0.5592405)
        assert list(network.proof_s) == ["scheduler", "server0"]
        for seconds in network.proof_s.values():
            assert seconds > 0.85 * network.ideal_s  # nothing is faster than the rate
        asks = "import socket; print(*map(socket.gethostbyname, ['server0', '%s']))"
        words = [sys.executable, "-c", asks % os.uname().nodename]
        shown = subprocess.run(
            network.command("scheduler") + words, capture_output=True, text=True
        ).stdout
        addresses = [network.address(name) for name in ("server0", "scheduler")]
        assert shown.split() == addresses == ["10.77.0.2", "10.77.0.1"]
        with pytest.raises(ConfigError, match="no node 'b' in the network; known: sch"):
            network.address("b")
    assert left() == []


@needs_rights
def test_nothing_is_left_after_an_exception():
    with pytest.raises(ZeroDivisionError):
        with emulated_network(["a"], None, prefix=PREFIX):
            assert len(left()) == 3
            1 / 0  # noqa: B018
    assert left() == []


@needs_rights
def test_nothing_is_left_after_sigterm(holder):
    holder.send_signal(signal.SIGTERM)
    assert holder.wait(timeout=100) == 143
    assert left() == []


@needs_rights
def test_what_a_killed_run_left_is_replaced(holder):
    with pytest.raises(ConfigError, match="another run uses the emulated network 'moe"):
        with emulated_network(["c"], None, prefix=PREFIX):
            pass
    assert len(left()) == 5  # untouched
    holder.kill()
    holder.wait()
    deadline_s = time.monotonic() + 100
    while time.monotonic() < deadline_s:  # its lock goes with it
        try:
            with emulated_network(["c"], None, prefix=PREFIX):
                assert left() == [f"{PREFIX}.-switch", f"{PREFIX}.c", f"{PREFIX}.c"]
                break
        except ConfigError:
            time.sleep(0.05)
    assert left() == []


@needs_rights
def test_a_rate_that_is_not_kept_is_refused(monkeypatch):
    monkeypatch.setattr(namespaces, "ATTEMPTS", 1)
    shaping = namespaces.shaping
    monkeypatch.setattr(namespaces, "shaping", lambda dev, mbps: shaping(dev, mbps / 2))
    with pytest.raises(
        ConfigError, match=r"from a to b carried 4 MiB in \d.* expected 83\.9 at 400 "
    ):
        with emulated_network(["a", "b"], 400.0, prefix=PREFIX):
            pass
    assert left() == []


def test_missing_rights_are_one_line(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else name)
    assert missing_rights() == "there is no program 'tc'; install iproute2"
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert (
        missing_rights() == "only root may make namespaces, this is user 1000; use sudo"
    )
    with pytest.raises(ConfigError, match="needs an emulated network: only root may"):
        with emulated_network(["a"], 1.0, prefix=PREFIX):
            pass


@needs_rights
def test_a_kernel_without_a_part_is_named(monkeypatch):
    monkeypatch.setattr(
        namespaces, "shaping", lambda dev, _: ["qdisc", "add", "dev", dev, "netem0"]
    )
    found = missing_rights()
    assert "netem0` failed: " in found and "\n" not in found and "tbf" in found


@pytest.mark.parametrize(
    "names, mbps, message",
    [
        (["a", "a"], 1.0, "2 nodes: a, a, expected 1 to 200 different names"),
        ([], 1.0, "0 nodes: , expected 1 to 200"),
        (["a b"], 1.0, "name 'a b' of a node, expected letters, digits, _"),
        (["a"], 0.0, "link_mbps must be positive, got 0.0"),
    ],
)
def test_bad_networks_are_refused(names, mbps, message):
    with pytest.raises(ConfigError, match=message):
        with emulated_network(names, mbps, prefix=PREFIX):
            pass

"""Packets get lost: from one server to another one only, or all of one server."""

import fcntl
import json
import re
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from moe_edge.cluster import content
from moe_edge.cluster.network.namespaces import missing_rights
from tests.support.live_run import LiveRun

reason = missing_rights()
needs_rights = pytest.mark.skipif(reason is not None, reason=f"no networks: {reason}")
NOBODY = "02:00:00:00:00:99"  # no machine has this address


def ip(*words) -> str:
    command = ["ip", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def lose_packets(source: str, target: str) -> None:
    """From now on nothing that one node sends arrives at the other."""
    found = re.search(r"inet ([\d.]+)/", ip("-n", target, "addr", "show", "eth0"))
    where = "dev", "eth0", "nud", "permanent"
    ip("-n", source, "neigh", "replace", found[1], "lladdr", NOBODY, *where)


def tokens_in(folder) -> dict[str, list[int]]:
    lines = (folder / "generations.jsonl").read_text().splitlines()
    return {row["id"]: row["tokens"] for row in map(json.loads, lines)}


def flags_of(tiny, name, **more) -> list[str]:
    """Of a cluster of three servers, with a folder and more flags."""
    asked = {"workload": "arithmetic,words,arithmetic", "output_tokens": 4}
    asked |= {"checkpoint": tiny, "servers": 3, "slots": "12,12,12", "seed": 3}
    asked |= {"requests_per_server": 6, "hung_s": 2, "out_dir": name}
    return [f"--{key}={value}" for key, value in (asked | more).items()]


@pytest.fixture
def alone():
    """Nobody else's test has the network, whose name all runs share."""
    path = Path(tempfile.gettempdir()) / "moe-edge-tests.network.lock"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def run(alone, start, tiny):
    return lambda name, **more: start(*flags_of(tiny, name, **more))


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory) -> dict[str, list[int]]:
    """The tokens where no packet is lost."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(content.CACHE, str(folder / "cache"))
        flags = flags_of(tiny, "whole", interval_s=0.01, hung_s=60)
        run = LiveRun(folder, *flags)
    try:
        assert run.wait() == 0, run.stderr
    finally:
        run.end()
    return tokens_in(folder / "whole")


@needs_rights
@pytest.mark.slow
def test_one_way_loss_sets_both_pairs_apart_and_evicts_nobody(run, whole, tmp_path):
    lossy = run("lossy", interval_s=2.0, link_mbps=20)
    lossy.wait_for("compiled in")
    lose_packets("moe-edge.server0", "moe-edge.server1")
    assert lossy.wait() == 0, lossy.stderr
    summary = lossy.summary
    assert sorted(summary["bad_pairs"]) == [[0, 1], [1, 0]]
    assert not summary["failures"]
    assert summary["degraded"] == summary["lost_requests"] == 0
    assert tokens_in(tmp_path / "lossy") == whole


@needs_rights
@pytest.mark.slow
def test_a_server_whose_network_was_out_comes_back(run, whole, tmp_path):
    broken = run("broken", interval_s=4.0, link_mbps=20)
    broken.wait_for("compiled in")
    for up_or_down in ("down", "up"):
        time.sleep(5.0)
        ip("-n", "moe-edge.server1", "link", "set", "eth0", up_or_down)
    assert broken.wait() == 0, broken.stderr
    (failure,) = broken.summary["failures"]
    assert (failure["server"], failure["kind"]) == (1, "hung")
    assert failure["returned_s"] > failure["detected_s"]
    assert broken.summary["lost_requests"] == 0
    assert tokens_in(tmp_path / "broken") == whole

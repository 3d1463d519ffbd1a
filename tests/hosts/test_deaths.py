"""One of two processes is killed, stopped or late, in a step or while all rest."""

import json
import os
import subprocess
import sys

import pytest

from moe_edge.hosts.link import LOST_S
from moe_edge.hosts.run import HEARTBEAT_S
from tests.support.host_processes import PAUSE_S
from tests.support.live_run import ROOT, unused_ports

pytestmark = pytest.mark.slow

# Who is struck: process 0 holds JAX's coordinator, whose end JAX answers by an abort.
KILLED = ("kill 0 step", "kill 1 step", "kill 0 rest", "kill 1 rest")
STOPPED = ("stop 0 step", "stop 1 step", "stop 0 rest", "stop 1 rest")
PAUSED = ("pause 1 step",)
DIFFERENT = "differ 1 start"


@pytest.fixture(scope="module")
def ends(tmp_path_factory) -> dict[str, list]:
    """Of each scenario: exit code, seconds and output of both processes."""
    scenarios = (*KILLED, *STOPPED, *PAUSED, DIFFERENT)
    ports = map(str, unused_ports(len(scenarios)))
    words = [word for pair in zip(scenarios, ports, strict=True) for word in pair]
    folder = tmp_path_factory.mktemp("hosts")
    flag = "--xla_force_host_platform_device_count=1"
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.host_processes", str(folder), *words],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flag},
        timeout=300,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def survivor(ends, scenario: str) -> tuple:
    victim = int(scenario.split()[1])
    return ends[scenario][1 - victim]


@pytest.mark.parametrize("scenario", KILLED)
def test_who_is_left_of_a_killed_pair_ends_by_one_line(ends, scenario):
    code, seconds, text = survivor(ends, scenario)
    assert code == 3
    assert seconds < HEARTBEAT_S, "JAX noticed by a heartbeat"
    (line,) = text.splitlines()
    victim = scenario.split()[1]
    # By the connection that closed: by a heartbeat the line would say otherwise.
    by_us = f"error: process {victim} has ended without a word: it was killed, or"
    by_jax = "error: the coordinator or another process is gone, says JAX; start all"
    assert line.startswith((by_us, by_jax))


@pytest.mark.parametrize("scenario", STOPPED)
def test_who_waits_for_a_stopped_process_ends_before_jax_aborts_it(ends, scenario):
    code, seconds, text = survivor(ends, scenario)
    assert code == 3
    # Its last beat may have been long before on a loaded machine.
    assert LOST_S / 2 < seconds < HEARTBEAT_S
    victim = scenario.split()[1]
    (line,) = text.splitlines()
    assert line.startswith(f"error: process {victim} gave no sign of life for 7 s: it")


@pytest.mark.parametrize("scenario", PAUSED)
def test_a_process_that_is_late_delays_the_others_and_ends_nobody(ends, scenario):
    for code, seconds, text in ends[scenario]:
        assert (code, text) == (0, "")
        assert seconds > PAUSE_S


def test_processes_that_differ_both_refuse_by_one_line(ends):
    line = (
        "error: process 1 differs from process 0 in version of moe_edge: other, there "
        "one; install the same version everywhere\n"
    )
    assert [(code, text) for code, _, text in ends[DIFFERENT]] == [(2, line)] * 2

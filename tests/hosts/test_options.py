"""Flags of several processes, and what schedulers set in their place."""

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.hosts.options import HostOptions, split_address
from moe_edge.hosts.place import Place, find_place, scheduler_of

HERE = "127.0.0.1:7000"
SLURM = {
    "SLURM_JOB_ID": "4096",
    "SLURM_STEP_NODELIST": "node[07-08],other",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
INDEXED = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}


@pytest.mark.parametrize(
    "given, message",
    [
        (
            {"coordinator": HERE},
            "--coordinator without --num_processes and --process_id; several",
        ),
        (
            {"num_processes": 2, "process_id": 0},
            "--num_processes and --process_id without --coordinator",
        ),
        (
            {"coordinator": HERE, "num_processes": 2, "process_id": 2},
            "--process_id is 2, expected 0 to 1 with --num_processes 2",
        ),
        ({"num_processes": 1, "process_id": 3}, "--process_id is 3"),
        ({"num_processes": 0}, "num_processes must be"),
        ({"join_timeout_s": 0}, "join_timeout_s must be positive, got 0"),
        (
            {"coordinator": "here:0", "num_processes": 2, "process_id": 0},
            "--coordinator is 'here:0', expected HOST:PORT with a port from 1",
        ),
    ],
)
def test_flags_that_do_not_belong_together_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        HostOptions(**given)


def test_address_of_ipv6_loses_its_brackets():
    assert split_address("[::1]:80") == ("::1", 80)


def test_a_process_alone_has_no_place():
    assert find_place(HostOptions(), {}) is None
    assert find_place(HostOptions(num_processes=1), SLURM) is None
    alone = HostOptions(coordinator=HERE, num_processes=1, process_id=0)
    assert find_place(alone, {}) is None


def test_flags_come_before_a_scheduler():
    given = HostOptions(coordinator=HERE, num_processes=4, process_id=3)
    assert find_place(given, SLURM) == Place("127.0.0.1", 7000, 3, 4)


@pytest.mark.parametrize(
    "environ, name",
    [
        (SLURM, "SLURM"),
        (SLURM | {"SLURM_NTASKS": "1"}, None),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}, None),  # a job's own script
        (OPEN_MPI, "Open MPI"),
        (INDEXED, "Kubernetes"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # any pod
    ],
)
def test_scheduler_is_known_by_its_variables(environ, name):
    assert scheduler_of(environ) == name


@pytest.mark.parametrize(
    "environ, place",
    [
        (SLURM, Place("node07", 61440, 1, 2, [0])),
        (OPEN_MPI, Place("10.96.0.1", 62748, 2, 3, [1])),
    ],
)
def test_scheduler_gives_the_place(environ, place, monkeypatch):
    """JAX reads them, in the process's own environment."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found = find_place(HostOptions(), environ)
    if place.host != "node07":  # a port that JAX derives
        place = place._replace(port=found.port)
    assert found == place


def test_scheduler_that_jax_cannot_read_is_refused_with_the_way_out(monkeypatch):
    for name, value in (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "two"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="Open MPI started .* 'two'.* to run alone"):
        find_place(HostOptions(), OPEN_MPI)

"""What processes are started with."""

import os

import pytest

from moe_edge.cluster import supervisor
from moe_edge.cluster.modes import options_of
from moe_edge.cluster.supervisor import CACHE, Processes

OD_MOE = {"mode": "od_moe", "workers": 2, "groups": 1, "prompts": __file__}
PRISM = {"workload": "words,words,words"}


@pytest.fixture
def environment_of(tmp_path, monkeypatch):
    """The environment that processes of such options get on two cores."""
    got = []

    class Started:
        pid = 1

        def __init__(self, command, env, **_):
            got.append(env)

        def poll(self):
            return 0

        def wait(self):
            pass

    monkeypatch.setattr(supervisor.subprocess, "Popen", Started)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)
    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.setenv(CACHE, "/cache")

    def start(processes: int, own=None, **options) -> dict[str, str]:
        options, where = options_of(**options), tmp_path / "spec.json"
        with Processes(where, options, tmp_path, {}, own=own) as started:
            started.start(list(range(processes)))
        return got[-1]

    return start


def test_more_processes_of_od_moe_than_cores_take_one_thread_each(environment_of):
    one = environment_of(3, **OD_MOE)
    assert one["NPROC"] == "1"
    assert one[CACHE] == "/cache/one_thread"  # its programs are others


@pytest.mark.parametrize(
    "processes, options",
    [(2, OD_MOE), (3, OD_MOE | {"cores": "0,0,0"}), (3, PRISM)],
)
def test_all_others_take_the_threads_that_there_are(processes, options, environment_of):
    one = environment_of(processes, **options)
    assert "NPROC" not in one and one[CACHE] == "/cache"


def test_what_a_process_has_of_its_own_is_not_that_of_all(environment_of, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert environment_of(2, {1: {"CUDA_VISIBLE_DEVICES": "1"}}, **PRISM) == (
        environment_of(1, **PRISM) | {"CUDA_VISIBLE_DEVICES": "1"}
    )


def test_given_number_of_threads_and_no_cache_stay(environment_of, monkeypatch):
    monkeypatch.delenv(CACHE)
    assert CACHE not in environment_of(3, **OD_MOE)
    monkeypatch.setenv("NPROC", "2")
    assert environment_of(3, **OD_MOE)["NPROC"] == "2"


def test_a_process_that_says_no_error_is_named_with_its_signal(tmp_path):
    options = options_of(**PRISM)
    processes = Processes(tmp_path / "spec.json", options, tmp_path, {})
    log = tmp_path / f"{options.name_of(1)}.log"
    log.write_text("Segmentation fault\n")
    assert "server0 was killed by signal 11; all" in str(processes._error_of({1: -11}))

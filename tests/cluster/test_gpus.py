"""Which GPU each process is told to use; no GPU is needed for that."""

import numpy as np
import pytest

from moe_edge.cluster import gpus, run
from moe_edge.cluster.gpus import ORDER, VISIBLE, gpu_environments, one_gpu_each
from moe_edge.cluster.modes import options_of
from moe_edge.cluster.prism.model_checks import given_placement
from moe_edge.cluster.run import run_cluster
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import ConfigError
from moe_edge.place.plan import Placement

ALL = [0, 1, 2, 3]  # the scheduler and three servers
ON_TWO = {VISIBLE: "4,7"}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of three GPUs."""
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(gpus, "_DEVICES", tmp_path)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv(VISIBLE, raising=False)


def visible(environment=ON_TWO, numbers=ALL, named=None, **options) -> list[str | None]:
    """What each process sees; None: nothing is said."""
    options = options_of(workload="words,words,words", **options)
    found = gpu_environments(options, numbers, environment, named)
    return [found.get(number, {}).get(VISIBLE) for number in numbers]


def test_processes_take_one_gpu_each_and_begin_again(machine):
    assert visible(environment={}) == ["0", "0", "1", "2"]
    assert visible() == ["4", "4", "7", "4"]  # of those that the user lets JAX see
    assert visible(mode="od_moe", workers=2, numbers=[*ALL, 4]) == [*"44747"]
    # Started one by one, they take what they would take together.
    assert visible(numbers=[2]) == ["7"] and visible(numbers=[0]) == [None]


@pytest.mark.parametrize(
    "environment",
    [{VISIBLE: "3"}, {VISIBLE: ""}, {VISIBLE: "-1"}, {"JAX_PLATFORMS": "cpu"}],
)
def test_nothing_is_said_where_there_is_nothing_to_choose(environment, machine):
    assert visible(environment=environment) == [None] * 4


def test_gpus_are_numbered_as_by_nvidia_smi_unless_the_user_named_them(machine):
    options = options_of(workload="words,words,words")
    assert gpu_environments(options, [1], {}) == {
        1: {VISIBLE: "0", ORDER: "PCI_BUS_ID"}
    }
    assert gpu_environments(options, [1], ON_TWO) == {1: {VISIBLE: "4"}}


def test_gpus_that_are_named_are_taken(machine):
    assert visible(gpus="1,1,0") == ["7", "7", "7", "4"]
    assert visible(named=[1, 0, 1]) == ["7", "7", "4", "7"]
    assert visible(named=[1, 0, 1], gpus="0,0,1") == ["4", "4", "4", "7"]
    assert visible(named=[1, 0, 1], environment={"JAX_PLATFORMS": "cpu"}) == [None] * 4
    assert visible(numbers=[3], gpus="1") == ["7"]
    assert visible(gpus="1+0,1,0") == ["7", "7,4", "7", "4"]


@pytest.mark.parametrize(
    "given, text",
    [
        ({"gpus": "0,x,1"}, "--gpus is '0,x,1', expected numbers of GPUs separated by"),
        ({"gpus": ""}, "--gpus is '', expected numbers of GPUs"),
        ({"gpus": "0,1"}, "--gpus names 2 GPUs, expected one for each of the 3 proc"),
        ({"gpus": "0", "numbers": [0]}, "names 1 GPUs, expected one for each of the 0"),
        ({"gpus": "0,2,1"}, "--gpus names GPU 2, but this machine has 2, counted fr"),
        ({"gpus": "0+,1,1"}, r"--gpus is '0\+,1,1', expected numbers of GPUs"),
        ({"gpus": "0,1+0+1,1"}, r"gives one process 1\+0\+1, expected each GPU once"),
        ({"gpus": "0,1+2,1"}, "--gpus names GPU 2, but this machine has 2"),
        (
            {"gpus": "0+1,0,1", "methods": "moe_infinity"},
            "several GPUs, which --methods moe_infinity does not use",
        ),
        ({"named": [0, 5, 1]}, "--placement names GPU 5, but this machine has 2, cou"),
        (
            {"gpus": "0,0,0", "environment": {"JAX_PLATFORMS": "cpu"}},
            r"names GPU 0, but this machine has none \(of those that CUDA_VIS",
        ),
    ],
)
def test_gpus_that_cannot_be_are_refused(given, text, machine):
    with pytest.raises(ConfigError, match=text):
        visible(**given)


def placed(*gpu_NE) -> Placement:
    """Of one layer."""
    return Placement(np.array(gpu_NE, np.int8)[:, None])


def test_a_server_of_several_gpus_becomes_one_for_each():
    placement, named = one_gpu_each(placed([0, 1, 1, -1], [-1, -1, 0, 0]), 3)
    assert placement.gpu_NLE[:, 0].tolist() == [
        [0, -1, -1, -1],
        [-1, 0, 0, -1],
        [-1, -1, 0, 0],
    ]
    assert named is None  # one each, in order
    text = "over 2 servers with 3 GPUs in all; a process has one GPU: give --servers 3,"
    with pytest.raises(ConfigError, match=text):
        one_gpu_each(placed([0, 1, 1, -1], [-1, -1, 0, 0]), 2)
    # A process that has them all spreads blocks over them itself.
    placement, named = one_gpu_each(placed([0, 1, 1, -1], [-1, -1, 0, 0]), 2, True)
    assert placement.gpu_NLE[:, 0].tolist() == [[0, 0, 0, -1], [-1, -1, 0, 0]]
    assert named is None


def test_gpus_of_servers_with_one_are_those_that_the_placement_names():
    placement, named = one_gpu_each(placed([0, 0, -1], [-1, 1, 1]), 2)
    assert named == [0, 1] and placement.gpu_NLE.max() == 0
    placement, named = one_gpu_each(placed([0, 0, 0], [-1, -1, -1]), 2)
    assert named is None and placement.on_NLE[:, 0].tolist() == [
        [True] * 3,
        [False] * 3,
    ]


def test_processes_are_started_on_the_gpus_that_a_placement_names(
    machine, tiny, prompts, tmp_path, monkeypatch
):
    """By `run_cluster`, whose processes are not started here."""
    got = {}

    class Started(Exception):
        pass

    def processes(*_, own):
        got.update(own)
        raise Started

    monkeypatch.setattr(run, "Processes", processes)
    gpu_NLE = np.full((2, 2, 8), -1)
    gpu_NLE[0, :, :4], gpu_NLE[1, :, 4:] = 1, 2
    Placement(gpu_NLE).save(tmp_path / "placed")
    given = {"checkpoint": str(tiny), "prompts": str(prompts), "servers": 2}
    given |= {"placement": str(tmp_path / "placed"), "slots": "9,9"}
    with pytest.raises(Started):
        run_cluster(out_dir=str(tmp_path / "o"), **given)
    assert {number: own[VISIBLE] for number, own in got.items()} == {
        **{0: "1", 1: "1"},
        2: "2",
    }
    options = options_of(**given)
    placement, _ = given_placement(options, open_checkpoint(tiny).config)
    assert (placement.on_NLE == (gpu_NLE >= 0)).all()
    with pytest.raises(ConfigError, match="--gpus names GPU 3, but this machine has 3"):
        run_cluster(out_dir=str(tmp_path / "o"), gpus="0,3", **given)

"""Placements: what they refuse, their laws, files."""

import json

import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.place.plan import Placement, check_slots

# Two servers (one GPU, two GPUs), two layers of three blocks; block 2 is on both.
GPUS = np.array([[[0, -1, 0], [0, 0, 0]], [[-1, 0, 1], [1, 0, -1]]])
SLOTS = [np.array([5]), np.array([2, 2])]


def test_placement_counts_copies_and_memory():
    placement = Placement(GPUS)
    assert placement.copies_LE.tolist() == [[1, 1, 2], [2, 2, 1]]
    assert placement.coverage == 1.0
    assert placement.memory_use(SLOTS) == 1.0
    placement.check(SLOTS)


def test_check_uncovered_block_is_named():
    gpu_NLE = GPUS.copy()
    gpu_NLE[1, 0, 1] = -1
    assert Placement(gpu_NLE).coverage == pytest.approx(5 / 6)
    with pytest.raises(CapacityError, match="1 blocks .* block 1 of layer 0"):
        Placement(gpu_NLE).check(SLOTS)


def test_check_full_gpu_is_named_though_the_server_has_room():
    slots = [np.array([5]), np.array([1, 9])]
    with pytest.raises(CapacityError, match="GPU 0 of server 1 is given 2 .* holds 1"):
        Placement(GPUS).check(slots)


@pytest.mark.parametrize(
    "slots, message",
    [
        ([np.array([9])], "2 servers, slots are of 1"),
        ([np.array([9]), np.array([9])], "server 1 has 1 GPUs, .* GPU 1"),
    ],
)
def test_check_slots_of_another_cluster_are_refused(slots, message):
    with pytest.raises(ConfigError, match=message):
        Placement(GPUS).check(slots)


def test_save_load_round_trip_with_bool_array(tmp_path):
    Placement(GPUS).save(tmp_path / "placement_x", {"method": "x"})
    on_NLE = np.load(tmp_path / "placement_x.npy")
    assert on_NLE.dtype == bool
    assert (on_NLE == (GPUS >= 0)).all()
    stored = json.loads((tmp_path / "placement_x.json").read_text())
    assert stored["method"] == "x"
    assert (Placement.load(tmp_path / "placement_x").gpu_NLE == GPUS).all()


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("format_version", 7, "format_version 7, expected 1"),
        ("shape", [2, 3, 2], r"placement \[2, 3, 2\], got \[2, 2, 3\]"),
        ("gpus", [[0], [0]], "disagree about how many"),
        ("gpus", "01", r"p.json: gpus is '01', expected a list"),
        ("gpus", [["x"]], r"p.json: gpus is \[\['x'\]\], expected a list"),
        ("gpus", [[0], [300]], "server 1 holds a block on GPU 300, expected 0 to 126"),
    ],
)
def test_load_foreign_files_are_refused(tmp_path, field, value, message):
    Placement(GPUS).save(tmp_path / "p")
    path = tmp_path / "p.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ConfigError, match=message):
        Placement.load(tmp_path / "p")


def test_check_slots_less_than_one_copy_says_what_is_missing():
    slots = [np.array([3]), np.array([2, 1])]
    with pytest.raises(
        CapacityError, match=r"hold 6 blocks, .* needs 8: 2 blocks \(200 bytes\)"
    ):
        check_slots(slots, 2, 8, block_bytes=100)
    assert [s.tolist() for s in check_slots(slots, 2, 6)] == [[3], [2, 1]]


def test_check_slots_server_without_room_is_allowed_where_the_others_hold_all():
    slots = [np.array([9]), np.array([0, 0])]
    assert [s.tolist() for s in check_slots(slots, 2, 8)] == [[9], [0, 0]]
    with pytest.raises(CapacityError, match="hold 9 blocks"):
        check_slots(slots, 2, 10)


@pytest.mark.parametrize(
    "slots, message",
    [
        ([np.array([9])], "given for 1 servers, there are 2"),
        ([np.array([9]), np.array([], int)], "server 1 has slots for 0 GPUs"),
        ([np.array([9]), np.array([9, -1])], r"server 1 are \[9, -1\]"),
        ([np.array([9]), np.array([1.5])], r"server 1 are \[1.5\]"),
        ([np.array([9]), np.array([2**63], np.uint64)], r"server 1 are \[92233720"),
        ([np.array([9]), np.array([2**70])], r"are \[1180591620717411303424\], expect"),
        ([np.array([9]), np.ones(128, int)], "128 GPUs, expected 1 to 127"),
    ],
)
def test_check_slots_bad_input_is_refused(slots, message):
    with pytest.raises(ConfigError, match=message):
        check_slots(slots, 2, 8)

import json

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.hardware.presets import read_machine
from moe_edge.planner.costs import between
from moe_edge.planner.machine_file import machine_json, read_models, stored_costs
from tests.support.planned import COSTS, stored_machine

OPTIONS = OffloadOptions()


def written(folder, models=None, version=2):
    path = folder / "machine.json"
    stored = stored_machine(version)
    if models is not None:
        stored["models"] = models
    path.write_text(json.dumps(stored))
    return str(path)


def test_costs_come_back_as_they_were_written(tmp_path):
    path = written(tmp_path, {"abc": {"8": COSTS.to_json()}})
    found = stored_costs(path, "abc", 8, 1)
    assert found.to_json() == json.loads(json.dumps(COSTS.to_json()))
    assert stored_costs(path, "abc", 4, 1) is None
    assert stored_costs(path, "abc", 8, 2) is None


def test_version_1_is_read_and_has_no_models(tmp_path):
    path = written(tmp_path, version=1)
    assert read_machine(path).device.name == "here" and read_models(path) == {}
    assert stored_costs(path, "abc", 8, 1) is None


def test_entries_are_added_to_a_file_that_was_given(tmp_path):
    path = written(tmp_path, {"abc": {"8": COSTS.to_json()}})
    found = machine_json(path, {"def": {"4": {}}, "abc": {"2": {}}})
    assert {name: sorted(each) for name, each in found["models"].items()} == {
        "abc": ["2", "8"],
        "def": ["4"],
    }
    assert found["format_version"] == 2 and found["device"]["name"] == "here"


def test_machine_file_of_another_checkpoint_is_refused(tmp_path):
    path = written(tmp_path, {"abcdefabcdefabcdef": {"8": COSTS.to_json()}})
    with pytest.raises(ConfigError, match=r"abcdefabcdef\), this one has 0123"):
        stored_costs(path, "0123", 8, 1)


def test_damaged_models_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="models is 3, expected an object"):
        read_models(written(tmp_path, 3))
    path = written(tmp_path, {"abc": {"8": {"batch": 1}}})
    with pytest.raises(ConfigError, match=r"models.abc.8.*measure again"):
        stored_costs(path, "abc", 8, 1)


def test_between_is_linear_and_level_outside():
    points = [(2.0, 30.0), (1.0, 10.0)]
    assert [between(points, at) for at in (0, 1, 1.5, 2, 9)] == [10, 10, 20, 30, 30]
    assert between([], 1.0) == 0.0


def test_step_costs_share_a_step_among_layers():
    costs = COSTS.step_costs("none", COSTS.link(OPTIONS), 64, 4)
    assert costs.route_s == costs.experts_s == pytest.approx(0.008 / 8)
    assert costs.step_s == pytest.approx(0.002)
    assert COSTS.block_host_s("none", 0.0015) == pytest.approx(1.5e-4)


def test_own_link_copies_a_block_in_the_measured_time():
    assert COSTS.link(OPTIONS).seconds(COSTS.block_bytes) == pytest.approx(1e-3)

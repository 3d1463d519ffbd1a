"""Plans of several servers: placed and simulated, nothing measured."""

import json

import gin
import pytest

from moe_edge.cluster.prism.model_checks import given_placement
from moe_edge.cluster.prism_options import PrismOptions
from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.place.plan import Placement
from moe_edge.planner.options import PlanOptions
from moe_edge.planner.plan import check_plan
from moe_edge.planner.run_plan import NotFeasible, run_plan
from moe_edge.workload.trace_writer import write_trace
from tests.support.tiny_checkpoints import raw_config
from tests.support.traces import make_trace

TWO = {"servers": "rtx_4090,rtx_3090", "network": 1000.0, "device_memory": "75%"}
TWO |= {"prompt_tokens": 8, "new_tokens": 4}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw_config("olmoe")))
    return str(path)


def planned(config, folder, **given):
    return run_plan(
        out_dir=str(folder), config_json=config, overwrite=True, **{**TWO, **given}
    )


def test_servers_are_placed_simulated_and_written(config, tmp_path):
    out = tmp_path / "plan"
    summary = planned(config, out, kv_cache="bfloat16")
    chosen, predicted = summary["chosen"], summary["predicted"]
    placed = chosen["placement"]
    assert placed["servers"] == ["rtx_4090", "rtx_3090"] and summary["feasible"]
    raw = raw_config("olmoe")
    blocks = raw["num_experts"] * raw["num_hidden_layers"]
    assert placed["slots"] == [int(0.75 * blocks)] * 2
    assert chosen["offload"] == {}, "slots say what servers hold"
    assert predicted["host_bytes"] == predicted["mapped_bytes"] == [0.0] * 3
    low, middle, high = predicted["tpot_s"]
    assert 0 < low <= middle <= high and 0 < predicted["hit_ratio"][1] <= 1
    tried = [each["placement"]["method"] for each in summary["alternatives"]]
    assert len({placed["method"], *tried}) > 2
    gin_text = (out / "plan.gin").read_text()
    assert "cluster.servers = 2" in gin_text and "offload" not in gin_text
    assert "cluster.kv_cache = 'bfloat16'" in gin_text
    # What `moe-edge cluster` takes: a copy of everything, and a slot of each free.
    given = PrismOptions(
        servers=2,
        slots=",".join(map(str, placed["slots"])),
        placement=placed["path"],
        workload="words,words",
    )
    model = type("Config", (), {})()
    model.moe_layers = range(raw["num_hidden_layers"])
    model.moe = type("Moe", (), {"num_experts": raw["num_experts"]})
    found, _ = given_placement(given, model)
    assert found.coverage == 1.0
    assert "moe-edge cluster --gin_file" in (out / "README.md").read_text()
    gin.clear_config()


def test_a_slow_network_costs_time_and_a_target_out_of_reach_exits_3(config, tmp_path):
    fast = planned(config, tmp_path / "fast")["predicted"]["tpot_s"][1]
    slow = planned(config, tmp_path / "slow", network=1.0)["predicted"]["tpot_s"][1]
    assert slow > 2 * fast
    with pytest.raises(NotFeasible, match="the nearest misses tpot_s by"):
        planned(config, tmp_path / "none", tpot_ms=1e-6)
    stored = json.loads((tmp_path / "none" / "plan.json").read_text())
    assert stored["feasible"] is False and stored["chosen"]["placement"]


def test_recorded_routing_says_what_is_held_where(config, tmp_path):
    """Texts that use half of the experts find them all on their own server."""
    raw = raw_config("olmoe")
    E, K, L = raw["num_experts"], raw["num_experts_per_tok"], raw["num_hidden_layers"]
    rows = [
        (int(step > 3), step, layer, [(step + j) % (E // 2) for j in range(K)])
        for step in range(12)
        for layer in range(L)
    ]
    write_trace(tmp_path / "t.csv", make_trace(rows, num_experts=E))
    trace = str(tmp_path / "t.csv")
    summary = planned(config, tmp_path / "o", trace=trace, device_memory="95%")
    assert summary["predicted"]["hit_ratio"][1] == 1.0
    assert any("does not say its temperature" in n for n in summary["assumptions"])
    on_NLE = Placement.load(tmp_path / "o" / "placement").on_NLE
    assert on_NLE.any(axis=0).all() and on_NLE[:, :, : E // 2].all()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"network": None}, ConfigError, "how many megabits a second each may send"),
        ({"servers": None, "machine": "rtx_4090"}, ConfigError, "1000 is between serv"),
        ({"network": -1.0}, ConfigError, "network must be positive"),
        ({"servers": "2"}, ConfigError, "are of what --machine names; give it"),
        ({"servers": "65", "machine": "rtx_4090"}, ConfigError, "expected 1 to 64"),
        ({"machine": "rtx_4090"}, ConfigError, "names machines, and --machine is rtx"),
        ({"servers": "rtx_1,rtx_4090"}, ConfigError, "unknown device preset 'rtx_1'"),
        ({"fixed": ["eviction=lru"]}, ConfigError, "--fixed is of an engine of one"),
        ({"link_bytes_per_s": 1e9}, ConfigError, "--link_bytes_per_s is of an engine"),
        (
            {"context": 300000},
            CapacityError,
            r"--context is 300000 tokens a row, and the model's context is \d+; give",
        ),
        ({"device_memory": "25%"}, CapacityError, "one copy of the model needs"),
        ({"device_memory": "1KB"}, CapacityError, "the minimum is 2 slots"),
        ({"servers": "rtx_4090,"}, ConfigError, "has an empty name; give a machine"),
        ({"servers": ""}, ConfigError, "has an empty name"),
        ({"device_memory": "40%"}, CapacityError, "raise --device_memory, of each GPU"),
    ],
)
def test_bad_clusters_are_refused(config, given, error, message):
    with pytest.raises(error, match=message):
        asked = PlanOptions(config_json=config, **{**TWO, **given})
        check_plan(asked, *asked.base(None))


def test_policies_of_an_engine_are_none_of_servers(config):
    asked = PlanOptions(config_json=config, **TWO)
    given = asked.base(OffloadOptions(eviction="lfu"))
    with pytest.raises(ConfigError, match=r"offload.eviction is of one engine"):
        check_plan(asked, *given)

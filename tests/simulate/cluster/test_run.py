import json

import pytest

from moe_edge.core.checks import CapacityError, ConfigError, OutputError
from moe_edge.hardware.calibrate import Calibration
from moe_edge.hardware.cost_model import BlockShape
from moe_edge.hardware.presets import gpu
from moe_edge.place.run_place import run_place
from moe_edge.simulate.cluster.run import run_simulate

INF = float("inf")
FEW = {"requests_per_server": 3, "interval_s": 1.0, "correlated": False}
SHORT = FEW | {"input_tokens": 16, "output_tokens": 4}


def test_rows_files_and_table(tmp_path, capsys):
    out_dir = tmp_path / "out"
    summary = run_simulate(
        out_dir=str(out_dir),
        methods="uniform,optimal,moe_infinity_lb",
        seeds=3,
        timeline_s=0.5,
        config_text=lambda: "cfg",
        **SHORT,
    )
    rows = summary["methods"]
    assert set(rows["optimal"]) == {
        *("latency_s_N", "mean_latency_s", "local_ratio", "remote_calls")
    }
    assert rows["optimal"]["mean_latency_s"] < rows["uniform"]["mean_latency_s"]
    assert rows["optimal"]["local_ratio"] > rows["uniform"]["local_ratio"]
    assert rows["moe_infinity_lb"]["remote_calls"] == 0
    stored = json.loads((out_dir / "simulate.json").read_text())
    by_seed = [row["mean_latency_s"] for row in stored["by_seed"]["optimal"]]
    assert len(set(by_seed)) == 3
    assert rows["optimal"]["mean_latency_s"] == sorted(by_seed)[1]
    assert stored["hardware"][0]["name"] == "a100_40g"
    assert json.loads((out_dir / "timeline_optimal.json").read_text())["traceEvents"]
    lines = (out_dir / "requests_uniform.csv").read_text().splitlines()
    assert len(lines) == 1 + 9
    assert "remote calls" in capsys.readouterr().out


@pytest.mark.slow
def test_all_leaves_out_what_needs_equal_servers(tmp_path):
    summary = run_simulate(
        out_dir=str(tmp_path / "out"), input_tokens=1, output_tokens=1, **FEW
    )
    assert "eplb" in summary["left_out"] and "eplb" not in summary["methods"]
    assert {"prism", "optimal", "latency"} <= set(summary["methods"])
    dry = run_simulate(out_dir=str(tmp_path / "dry"), dry_run=True, **FEW)
    assert dry["methods"] == list(summary["methods"])


def test_dry_run_writes_nothing(tmp_path):
    out_dir = tmp_path / "out"
    summary = run_simulate(out_dir=str(out_dir), methods="prism", dry_run=True, **FEW)
    assert summary == {"dry_run": True, "methods": ["prism"], "out_dir": str(out_dir)}
    assert not out_dir.exists()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"methods": "prism,best"}, "unknown method 'best'; known: eplb"),
        ({"model": "gpt"}, "unknown model preset 'gpt'"),
        ({"cluster": "moon"}, "unknown cluster preset 'moon'"),
        ({"workload": "poetry"}, "unknown workload or routing domain 'poetry'"),
        ({"arrivals": "bus", "interval_s": None}, "unknown request trace 'bus'"),
        ({"interval_s": -1.0}, "arrival interval_s must be positive, got -1"),
        ({"seeds": 0}, "seeds must be a positive whole number, got 0"),
        ({"window_s": 0.0}, "window_s must be positive"),
        ({"source": "disk"}, "unknown source of blocks 'disk'"),
        ({"hysteresis": -1.0, "methods": "uniform"}, "hysteresis is -1.0, expected 0"),
        ({"period_s": -3.0, "methods": "uniform"}, "period_s must be 0 or more and"),
        ({"period_s": INF}, "period_s must be 0 or more and finite, got inf"),
        ({"keep": 2.0, "methods": "uniform"}, "keep must lie in"),
        ({"timeline_s": -3.0}, "timeline_s must be 0 or more and finite, got -3"),
        ({"timeline_s": float("nan")}, "timeline_s must be 0 or more and finite"),
        ({"window_s": INF}, "window_s must be finite, got inf"),
        ({"skew": INF}, "skew must be 0 or more and finite, got inf"),
        ({"interval_s": 0.0}, "arrival interval_s must be positive, got 0"),
        ({"interval_s": [1.0, 2.0]}, "interval_s has 2 numbers for 3 servers"),
        ({"interval_s": [-1.0, 1.0, 3.0]}, "interval_s must be positive, got -1"),
        ({"interval_s": INF}, "arrival interval_s must be finite, got inf"),
        ({"most_tokens": 0}, "most_tokens must be a positive whole number"),
        ({"trace_speed": 2.0}, "trace_speed would have no effect with Poisson"),
        ({"most_tokens": 9}, "most_tokens would have no effect with Poisson"),
        ({"arrivals": "mooncake"}, "interval_s would have no effect with arrivals of"),
        (
            {"arrivals": "mooncake", "interval_s": None, "input_tokens": 4},
            "input_tokens would have no effect with arrivals of mooncake",
        ),
        (
            {"routing_trace": "x.csv", "placed_for": "c4", "skew": 2.0},
            "placed_for, skew, correlated would have no effect with a routing_trace",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        run_simulate(out_dir=str(tmp_path / "out"), dry_run=True, **(FEW | change))


def test_too_little_memory_and_foreign_folders_are_refused(tmp_path):
    with pytest.raises(CapacityError, match="are missing"):
        run_simulate(
            out_dir=str(tmp_path / "out"),
            cluster_options={"expert_memory_share": 0.1},
            **FEW,
        )
    (tmp_path / "mine").write_text("x")
    with pytest.raises(OutputError, match="is not empty"):
        run_simulate(out_dir=str(tmp_path), **FEW)


def test_a_measured_machine_is_a_cluster(tmp_path):
    found = gpu("a100_40g")
    block = BlockShape(2048, 1408, 2)
    path = tmp_path / "machine.json"
    rows = ((1, 1e-3, 1e-3),)
    path.write_text(json.dumps(Calibration(found, block, rows, 1e9).to_json()))
    summary = run_simulate(
        out_dir=str(tmp_path / "out"),
        cluster=str(path),
        cluster_options={"num_servers": 4},
        methods="optimal",
        **FEW,
    )
    assert len(summary["methods"]["optimal"]["latency_s_N"]) == 4
    placed = run_place(
        out_dir=str(tmp_path / "placed"), cluster=str(path), methods="all"
    )
    assert placed["methods"]["optimal"]["coverage"] == 1


def test_servers_may_load_what_they_lack_and_migrate(tmp_path):
    summary = run_simulate(
        out_dir=str(tmp_path / "out"),
        cache_share=0.2,
        period_s=2.0,
        methods="uniform,optimal,moe_infinity",
        **SHORT,
    )
    stored = json.loads((tmp_path / "out" / "simulate.json").read_text())
    (row,) = stored["by_seed"]["optimal"]
    assert row["remote_calls"] == 0 and 0 < row["hit_ratio"] < 1
    assert "migrations" in row and stored["case"]["cache_share"] == 0.2
    assert summary["methods"]["optimal"]["local_ratio"] == 1
    with pytest.raises(ConfigError, match=r"cache_share must lie in \[0, 1\), got 1"):
        run_simulate(out_dir=str(tmp_path / "o"), cache_share=1.0, dry_run=True, **FEW)


@pytest.mark.slow
def test_all_leaves_out_what_the_cache_leaves_no_room_for(tmp_path):
    machines = {"cluster": "mixed", "cluster_options": {"gpus": [["h200"]] * 3}}

    def methods(**kwargs):
        out_dir = str(tmp_path / "out")
        done = run_simulate(out_dir=out_dir, dry_run=True, **machines, **FEW, **kwargs)
        return set(done["methods"])

    assert methods() - methods(cache_share=0.9) == {"eplb"}

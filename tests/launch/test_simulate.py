import json

import numpy as np

from moe_edge.place.plan import Placement
from moe_edge.simulate.cluster.run import run_simulate
from moe_edge.workload.cluster_run import RequestRow
from tests.support.cluster_runs import calibration, cluster_trace, facts, write_run


def test_simulate_prints_methods_last(run_script, tmp_path):
    flags = ["--methods", "uniform,optimal", "--requests_per_server", 2]
    flags += ["--interval_s", 1, "--period_s", 0, "--out_dir", "o"]
    done = run_script("simulate", *flags)
    methods = done.summary["methods"]
    assert list(methods) == ["uniform", "optimal"]
    assert len(methods["optimal"]["latency_s_N"]) == 3
    assert 0 < methods["optimal"]["local_ratio"] <= 1
    assert methods["uniform"]["remote_calls"] > methods["optimal"]["remote_calls"]
    stored = json.loads((tmp_path / "o" / "simulate.json").read_text())
    assert stored["methods"] == methods
    assert "simulate.requests_per_server = 2" in (tmp_path / "o/config.gin").read_text()


def test_simulate_serves_a_public_trace(tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    lines = [f"{i},{0.5 * i},{20 + i},{2 + i}" for i in range(9)]
    head = "request_id,arrival_s,input_tokens,output_tokens"
    (folder / "azure_conv.csv").write_text("\n".join([head, *lines]) + "\n")
    summary = run_simulate(
        out_dir=str(tmp_path / "o"),
        arrivals="azure_conv",
        data_dir=str(tmp_path),
        requests_per_server=2,
        methods="prism",
        correlated=False,
    )
    assert summary["methods"]["prism"]["mean_latency_s"] > 0
    rows = (tmp_path / "o" / "requests_prism.csv").read_text().splitlines()
    assert len(rows) == 1 + 6


def test_simulate_bad_flag_value_is_one_line(run_script):
    error = run_script("simulate", "--cluster", "moon", "--out_dir", "o").error
    assert "unknown cluster preset 'moon'; known: mixed, prism" in error


def test_simulate_does_a_cluster_run_again(run_script, tmp_path):
    placement = Placement(np.zeros((1, 2, 4)))
    trace = cluster_trace([[[[0, 1], [2, 3]]]], [0], [1], np.zeros((1, 2, 4)))
    served = [RequestRow(0, "words", 0.0, 3.0, 3.0)]
    of, costs = facts(slots=[8]), calibration(servers=1, head_s=1.0)
    write_run(tmp_path / "run", of, costs, placement, served, trace)
    done = run_script("simulate", "--cluster_run", "run", "--out_dir", "o")
    row = done.summary["methods"]["optimal"]
    assert (row["measured_latency_s"], row["mean_latency_s"]) == (3.0, 3.0)
    assert (row["error_pct"], row["local_ratio"]) == (0.0, 1.0)
    written = {path.name for path in (tmp_path / "o").iterdir()}
    assert written == {
        *("simulate.json", "config.gin", "requests_optimal.csv"),
        "events_optimal.jsonl",
    }
    flags = ["--cluster_run", "run", "--period_s", "1", "--out_dir", "p"]
    error = run_script("simulate", *flags).error
    assert "period_s would have no effect with a cluster_run" in error

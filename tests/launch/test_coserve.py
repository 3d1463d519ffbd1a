"""launch/coserve.py as a user runs it, in computed time."""

import json

from moe_edge.workload.coe_graph import write_graph
from moe_edge.workload.coe_tasks import (
    CoeRequest,
    board_graph,
    board_requests,
    write_requests,
)

COSTS = {
    "k_s": 0.01,
    "b_s": 0.02,
    "r2": 1.0,
    "max_batch": 4,
    "item_bytes": 10,
    "load_s": {"disk": 0.5, "host": 0.1},
}
BYTES = {"resnet101": 100, "yolov5m": 50, "yolov5l": 120}


def write_case(folder, more=()):
    """A board of 12 types, 40 requests, a profile: the flags that name them."""
    graph = board_graph(12, decay=4.0, record_bytes=BYTES)
    write_graph(folder / "coe.json", graph)
    requests = [*board_requests(graph, 40, 0.01), *more]
    write_requests(folder / "requests.jsonl", requests)
    one = {name: COSTS | {"record_bytes": size} for name, size in BYTES.items()}
    profile = {"machine": "m", "devices": {"gpu": one, "cpu": one}}
    (folder / "profile.json").write_text(json.dumps(profile))
    return ["--graph", "coe.json", "--requests", "requests.jsonl"]


MACHINE = ("--simulate", "profile.json", "--executors", "gpu:2,cpu:1")
MEMORY = ("--memory", "0.8KB,0.4KB")


def test_coserve_compares_policies_and_writes_what_became_of_requests(
    run_script, tmp_path
):
    strange = CoeRequest("strange", 0.4, "x", {"seed": 1, "defect": None})
    files = write_case(tmp_path, [strange])
    done = run_script(
        *("coserve", *files, *MACHINE, *MEMORY, "--policies", "all", "--events"),
        *("--out_dir", "o"),
    )
    found = done.summary
    assert (found["task"], found["kind"]) == ("requests", "simulated")
    assert found["verdicts_equal"] and found["accuracy"] is None
    assert len(found["policies"]) == 9
    for name, row in found["policies"].items():
        assert row["failed"] == 1 and row["throughput_per_s"] > 0
        assert sum(row["switches_by_tier"].values()) == row["switches"]
        lines = (tmp_path / "o" / f"outputs_{name}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert len(rows) == 41 and rows[-1]["id"] == "strange"
        assert rows[-1]["failed"] == "component 'x' has no rule"
        assert all(row["chain"] and row["latency_s"] > 0 for row in rows[:-1])
        events = (tmp_path / "o" / f"events_{name}.jsonl").read_text()
        assert events.count('"transfer"') == row["switches"]
    for name in ("coserve", "affinity", "em_ra"):
        row = found["policies"][name]
        assert row["switches"] >= found["bounds"]["distinct"]
        assert row["time_s"] >= found["bounds"]["time_s"]
    bound = found["bounds"]["belady_fcfs"]
    assert bound <= found["policies"]["samba"]["switches"]
    stored = json.loads((tmp_path / "o" / "coserve.json").read_text())
    assert stored["policies"] == found["policies"] and stored["settings"]["seed"] == 0


def test_coserve_runs_a_task_on_a_preset(run_script):
    flags = ["--simulate", "uma", "--task", "b1", "--decay", "20"]
    done = run_script("coserve", *flags, "--dry_run", "--out_dir", "o")
    assert done.summary["task"] == "b1"
    assert done.summary["policies"] == ["samba", "coserve", "affinity"]


def test_coserve_bad_input_ends_in_one_line(run_script, tmp_path):
    files = write_case(tmp_path)

    def error(*flags):
        return run_script("coserve", *flags, "--out_dir", "o").error

    assert "no value for --simulate" in error(*files)
    wrong = error(*files, "--simulate", "profile.json")
    assert "of a coe_profile.json say --executors and --memory too" in wrong
    assert "unknown policy 'best'; known: affinity" in error(
        *files, *MACHINE, *MEMORY, "--policies", "best"
    )
    assert "the largest expert has 120 bytes, the largest pool 60" in error(
        *files, *MACHINE, "--memory", "200B,100B"
    )
    assert "2 gpu executors have 170 bytes; each needs 40 for its largest" in error(
        *files, *MACHINE, "--memory", "170B,1KB"
    )
    assert "unknown task 'c3'" in error("--simulate", "numa", "--task", "c3")
    assert "max_wait_s must be 0 or more and finite, got -1.0" in error(
        "--simulate", "numa", "--max_wait_s", "-1"
    )
    assert "period_s must be positive, got 0" in error(
        "--simulate", "numa", "--period_s", "0"
    )
    assert "none of the 40 requests is of a component that has a rule" in error(
        "--simulate", "numa", *without_rules(tmp_path)
    )
    (tmp_path / "requests.jsonl").write_text("")
    assert "requests.jsonl holds no request" in error(*files, *MACHINE, *MEMORY)


def without_rules(folder):
    """Requests of components that no rule names."""
    path = folder / "others.jsonl"
    text = (folder / "requests.jsonl").read_text()
    path.write_text(text.replace("component_", "part_"))
    return ["--requests", "others.jsonl"]

"""launch/coserve.py as a user runs it, in computed time and live."""

import dataclasses
import json
import re

import numpy as np
import pytest

from moe_edge.papers.coserve.coe.accuracy import write_accuracy
from moe_edge.papers.coserve.coe.case import DEMO_BOARD
from moe_edge.papers.coserve.workload.coe_graph import read_graph, write_graph
from moe_edge.papers.coserve.workload.coe_tasks import (
    CoeRequest,
    board_graph,
    board_requests,
    read_requests,
    write_requests,
)
from tests.launch.conftest import ROOT
from tests.papers.coserve.support.coe_boards import (
    drawn_requests,
    write_board,
    write_board_requests,
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
    assert len(found["policies"]) == 10
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
        assert row["switches"] >= row["least_switches"] > 0
        assert row["time_s"] >= row["least_time_s"] > 0
        said = f"switches of experts (.*), longest wait {row['longest_wait_s']:.4g} s"
        assert re.search(f"^{name}: .* {said}$", done.stdout, re.MULTILINE)
    least = {n: row["least_switches"] for n, row in found["policies"].items()}
    # One pool starts with fewer experts than those of all executors.
    assert least["samba"] > least["coserve"]
    times = {n: row["least_time_s"] for n, row in found["policies"].items()}
    assert times["samba_no_tier"] > times["coserve"]
    bound = found["bounds"]["belady_fcfs"]
    assert bound <= found["policies"]["samba"]["switches"]
    stored = json.loads((tmp_path / "o" / "coserve.json").read_text())
    assert stored["policies"] == found["policies"] and stored["settings"]["seed"] == 0


def test_coserve_runs_a_task_on_a_preset(run_script):
    flags = ["--simulate", "uma", "--task", "b1", "--decay", "20"]
    done = run_script("coserve", *flags, "--dry_run", "--out_dir", "o")
    assert done.summary["task"] == "b1"
    assert done.summary["policies"] == ["samba", "coserve", "affinity"]


def write_live(folder, requests=40):
    """A board of tiny networks, requests, costs: the flags that name them."""
    graph = write_board(folder)
    drawn = drawn_requests(graph, requests)
    np.save(folder / "nan.npy", np.full((32, 32, 3), np.nan, np.float32))
    odd = [
        CoeRequest("nan", 0.05, "component_0", "nan.npy"),
        CoeRequest("strange", 0.05, "x", {"seed": 1, "defect": None}),
    ]
    write_board_requests(folder, [*drawn, *odd])
    load_s = {"disk": 0.003, "host": 0.001}
    costs = COSTS | {"k_s": 1e-4, "b_s": 1e-4, "load_s": load_s}
    one = {
        name: costs | {"record_bytes": each.record_bytes}
        for name, each in graph.architectures.items()
    }
    profile = {"machine": "m", "devices": {"gpu": one, "cpu": one}}
    (folder / "profile.json").write_text(json.dumps(profile))
    return ["--graph", "coe.json", "--requests", "requests.jsonl"]


LIVE = ("--profile", "profile.json", "--executors", "gpu:2,cpu:1")


@pytest.mark.slow
def test_coserve_serves_live_and_tells_the_same_of_every_policy(run_script, tmp_path):
    files = write_live(tmp_path)
    accuracy = {"collaboration": 0.99, "single": 0.9, "single_wide": None}
    write_accuracy(tmp_path, read_graph(tmp_path / "coe.json"), accuracy)
    flags = (*files, *LIVE, "--memory", "50KB,25KB", "--events")
    done = run_script("coserve", *flags, "--out_dir", "o")
    found = done.summary
    assert (found["kind"], found["accuracy"]) == ("emulated", accuracy)
    assert "collaboration 0.9900, single 0.9000, single_wide not trained" in done.stdout
    assert found["verdicts_equal"] and found["bounds"]["belady_fcfs"] > 0
    told = []
    for name, row in found["policies"].items():
        assert row["failed"] == 2 and row["throughput_per_s"] > 0
        assert row["late_s"]["p99"] >= 0 and row["decision_s"] > 0
        assert 0 < row["management_ratio"] < 1 and 0 < row["scheduling_ratio"] < 1
        lines = (tmp_path / "o" / f"outputs_{name}.jsonl").read_text().splitlines()
        rows = {row["id"]: row for row in map(json.loads, lines)}
        assert len(rows) == len(lines) == 42
        assert rows["strange"]["failed"] == "component 'x' has no rule"
        assert "nan.npy holds NaN" in rows["nan"]["failed"]
        assert rows["nan"]["chain"] == [] and rows["nan"]["verdict"] is None
        for number in range(40):
            one = rows[number]
            assert len(one["scores"]) == len(one["chain"]) in (1, 2)
            assert all(isinstance(each, dict) for each in one["scores"])
        told.append([(r["verdict"], r["chain"], r["scores"]) for r in rows.values()])
        events = (tmp_path / "o" / f"events_{name}.jsonl").read_text()
        assert events.count('"transfer"') == row["switches"]
    assert [t[:2] for t in told[0]] == [t[:2] for t in told[1]]


def test_coserve_live_measures_costs_where_no_profile_is_given(run_script, tmp_path):
    files = write_live(tmp_path, 4)
    flags = (*files, "--policies", "affinity", "--out_dir", "o")
    assert run_script("coserve", *flags).summary["kind"] == "emulated"
    stored = json.loads((tmp_path / "o" / "coserve.json").read_text())
    assert stored["source"] == "measured at the start"


def test_coserve_refuses_accuracies_of_another_form_or_other_weights_before_it_serves(
    run_script, tmp_path, monkeypatch
):
    files = write_live(tmp_path, 4)
    monkeypatch.setattr(
        "moe_edge.papers.coserve.simulate.coe_run.make_live", None
    )  # not called
    path = tmp_path / "accuracy.json"
    graph = read_graph(tmp_path / "coe.json")
    shares = {"collaboration": 0.99, "single": None, "single_wide": None}
    write_accuracy(tmp_path, graph, shares)
    good = json.loads(path.read_text())
    for content, said in (
        (good | {"collaboration": "high"}, "collaboration is 'high', expected a num"),
        (good | {"single": 1.5}, "accuracy.json: single is 1.5, expected a share"),
        (
            shares,
            "accuracy.json lacks weights_sha256; delete it, or let moe-edge train_",
        ),
        ([], "accuracy.json is [], expected names and values"),
    ):
        path.write_text(json.dumps(content))
        assert said in run_script("coserve", *files, "--out_dir", "o").error
    path.write_text(json.dumps(good))
    experts = [dataclasses.replace(e, sha256=64 * "0") for e in graph.experts]
    write_graph(
        tmp_path / "coe.json",
        dataclasses.replace(graph, experts=experts),
    )
    wrong = run_script("coserve", *files, "--dry_run", "--out_dir", "o").error
    assert f"is of weights {good['weights_sha256'][:12]}, the experts of the" in wrong


@pytest.mark.slow
def test_coserve_task_without_a_graph_runs_live_on_random_weights(run_script, tmp_path):
    flags = ("--task", "b1", "--policies", "affinity", "--profile", "reduced")
    found = run_script("coserve", *flags, "--out_dir", "o").summary
    assert (found["task"], found["kind"]) == ("b1", "emulated")
    assert found["accuracy"] is None and found["distinct_experts"] > 100
    row = found["policies"]["affinity"]
    assert row["failed"] == 0 and row["switches"] >= row["least_switches"]
    stored = json.loads((tmp_path / "o" / "coserve.json").read_text())
    assert stored["settings"]["graph"] is None


def test_demo_serves_the_verdicts_that_were_drawn(run_script, tmp_path):
    """As who has just cloned it, by one policy; all of its experts are trained."""
    config = ROOT / "configs/experiments/coserve_demo.gin"
    flags = ("--gin_file", config, "--policies", "affinity", "--out_dir", "o")
    found = run_script("coserve", *flags).summary
    assert found["policies"]["affinity"]["failed"] == 0
    graph = read_graph(DEMO_BOARD / "coe.json")
    trained = {expert.id for expert in graph.experts if expert.trained}
    drawn = {one.id: one.drawn for one in read_requests(DEMO_BOARD / "requests.jsonl")}
    lines = (tmp_path / "o" / "outputs_affinity.jsonl").read_text().splitlines()
    served = [one for one in map(json.loads, lines) if trained.issuperset(one["chain"])]
    right = {verdict: [] for verdict in drawn.values()}
    for one in served:
        right[drawn[one["id"]]].append(one["verdict"] == drawn[one["id"]])
    assert len(served) == 400 and len(right) == 4
    assert np.mean(sum(right.values(), [])) >= 0.98
    assert all(np.mean(found) >= 0.8 for found in right.values())  # of few images


def test_coserve_live_bad_weights_end_in_one_line(run_script, tmp_path):
    files = write_live(tmp_path, 4)
    flags = ("coserve", *files, *LIVE, "--memory", "50KB,25KB", "--out_dir", "o")
    first, second = (tmp_path / "experts" / f"classifier_{n}.bin" for n in range(2))
    good = first.read_bytes()
    first.write_bytes(good[:-64])
    second.unlink()
    error = run_script(*flags).error
    assert "classifier_0 " in error and "classifier_1 " in error
    assert f"{len(good) - 64} bytes, expected {len(good)}" in error
    second.write_bytes(good)
    first.write_bytes(good)
    assert "classifier_1 " in run_script(*flags).error  # another one's hash


def test_coserve_wrong_weights_are_refused_by_a_dry_run_and_in_computed_time(
    run_script, tmp_path
):
    files = write_live(tmp_path, 4)
    # A pool for each kind; numbers only matter to the costs.
    flags = ("coserve", *files, "--executors", "gpu:2,cpu:1", "--memory", "50KB,25KB")
    flags += ("--policies", "coserve")
    live, computed = ("--profile", "profile.json"), ("--simulate", "profile.json")
    ways = (*live, "--dry_run"), (*computed, "--dry_run"), computed
    path = tmp_path / "experts" / "classifier_0.bin"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    for number, way in enumerate(ways):
        error = run_script(*flags, *way, "--out_dir", f"o{number}").error
        assert "classifier_0 (" in error and ": sha256 " in error
    path.unlink()  # computed time needs no weights
    assert "No such file" in run_script(*flags, *ways[0], "--out_dir", "o").error
    for number, way in enumerate(ways[1:]):
        done = run_script(*flags, *way, "--out_dir", f"o{number}").summary
        assert done.get("kind", "simulated") == "simulated"


def test_coserve_bad_input_ends_in_one_line(run_script, tmp_path):
    files = write_case(tmp_path)

    def error(*flags):
        return run_script("coserve", "--out_dir", "o", *flags).error

    wrong = error(*files, "--simulate", "profile.json")
    assert "of a coe_profile.json say --executors and --memory too" in wrong
    assert "unknown policy 'best'; known: affinity" in error(
        *files, *MACHINE, *MEMORY, "--policies", "best"
    )
    assert "the largest expert has 120 bytes, the largest pool 60" in error(
        *files, *MACHINE, "--memory", "200B,100B"
    )
    assert "2 gpu executors have 110 bytes; each needs 10 for a batch and 50" in error(
        *files, *MACHINE, "--memory", "110B,1KB", "--policies", "coserve"
    )
    assert "trial_share is 0.0, expected a share above 0, up to 1" in error(
        "--simulate", "numa", "--trial_share", "0"
    )
    assert "window_start is 100 and window_margin 0.05, expected 1 to 99" in error(
        "--simulate", "numa", "--window_start", "100"
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
    assert "architecture 'resnet101': outputs of resnet101 are None" in error(*files)
    assert "--simulate numa and --profile uma: costs come from one" in error(
        "--simulate", "numa", "--profile", "uma"
    )
    # A folder that it reads from is not replaced.
    board = tmp_path / "W"
    board.mkdir()
    for name in ("coe.json", "config.gin"):
        (board / name).write_text((tmp_path / "coe.json").read_text())
    out = ("--out_dir", "W", "--overwrite")
    wrong = error("--graph", "W/coe.json", *MACHINE, *MEMORY, *out)
    assert "overlaps the source" in wrong
    (tmp_path / "requests.jsonl").write_text("")
    assert "requests.jsonl holds no request" in error(*files, *MACHINE, *MEMORY)


def without_rules(folder):
    """Requests of components that no rule names."""
    path = folder / "others.jsonl"
    text = (folder / "requests.jsonl").read_text()
    path.write_text(text.replace("component_", "part_"))
    return ["--requests", "others.jsonl"]


@pytest.mark.parametrize("executors", ["gpu:2", "gpu:4,cpu:1"])
def test_coserve_needs_no_memory_beside_executors_of_a_preset(run_script, executors):
    flags = ("--simulate", "numa", "--executors", executors, "--dry_run")
    assert run_script("coserve", *flags, "--out_dir", "o").code == 0


def test_coserve_finds_executors_and_resident_experts_by_trial(run_script, tmp_path):
    files = write_case(tmp_path)
    image = {"seed": 1, "defect": None}  # a sample of the first half would be of these
    strange = [CoeRequest(f"x{n}", 0.0, "x", image) for n in range(60)]
    known = read_requests(tmp_path / "requests.jsonl")
    write_requests(tmp_path / "requests.jsonl", [*strange, *known])
    flags = ("--trial", "--policies", "coserve,affinity", "--out_dir", "o")
    done = run_script("coserve", *files, *MACHINE, *MEMORY, *flags)
    assert "gpu:1,cpu:1" in done.stdout and done.summary["verdicts_equal"]
    found = json.loads((tmp_path / "o" / "coserve.json").read_text())["trial"]
    tried = [executors for executors, _ in found["executors_tried"]]
    assert tried[:2] == [{"gpu": 1}, {"gpu": 2}] and {"gpu": 3} not in tried
    assert found["executors"] in tried and found["window"]["chosen"] >= 1
    # Whoever has one executor keeps the whole machine, its tier in host memory too.
    alone = ("--policies", "samba", "--out_dir", "q")
    whole = run_script("coserve", *files, *MACHINE, *MEMORY, *alone).summary
    done = run_script(
        *("coserve", *files, *MACHINE, *MEMORY, "--trial"),
        *("--policies", "samba,coserve", "--out_dir", "r"),
    )
    for name in ("time_s", "switches_by_tier"):
        assert (
            done.summary["policies"]["samba"][name]
            == (whole["policies"]["samba"][name])
        )
    (tmp_path / "trial.gin").write_text(
        "coserve.trial_share = 0.2\ncoserve.window_start = 3\n"
    )
    more = ("--gin_file", "trial.gin", "--window_margin", "0.5", "--out_dir", "p")
    done = run_script("coserve", *files, *MACHINE, *MEMORY, *flags[:-2], *more)
    assert done.code == 0, done.stderr
    stored = json.loads((tmp_path / "p" / "coserve.json").read_text())
    settings = stored["settings"]
    names = ("trial_share", "window_start", "window_margin")
    assert [settings[name] for name in names] == [0.2, 3, 0.5]
    assert stored["trial"]["window"]["tried"][0][0] == 3
    assert stored["trial"]["executors_tried"] != found["executors_tried"]  # of fewer

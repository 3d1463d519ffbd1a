"""examples/my_policies, installed and run from outside of the repository."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.serving import COSTS
from tests.support.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "my_policies"
WAIT_S = 600.0  # for what a loaded machine may take

ENGINES = """
import json, sys
import moe_edge as me
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.run_generate import run_generate

checkpoint, asked = sys.argv[1], ("The river runs", 12)
model = me.load(checkpoint)
expected = model.resident().generate(*asked, ignore_eos=True).tokens
found = {}
for name, options in {
    "layered": {"mode": "layered", "predictor": "my_followers"},
    "fused": {"mode": "fused", "eviction_options": {"keep": 0.5}},
    "assist": {"mode": "layered", "assist": "my_first_travels"},
    "layered route": {"mode": "layered", "route": "my_drop_last"},
    "fused route": {"mode": "fused", "route": "my_drop_last"},
    "lossless route": {"route": "my_drop_last", "route_options": {"last": 0}},
}.items():
    with model.offload("50%", eviction="my_decayed", **options) as engine:
        tokens = engine.generate(*asked, ignore_eos=True).tokens
        report = engine.core.report()
        facts = {"equal": tokens == expected, "new": len(tokens)}
        facts |= {key: report.get(key) for key in ("eviction", "predictor", "route")}
        found[name] = facts | {"host_computed": report.get("host_computed")}
for name in ("predictor", "assist"):
    given = {"predictor": "my_followers", "assist": "my_first_travels"}[name]
    try:
        model.offload("50%", mode="fused", **{name: given})
    except me.ConfigError as error:
        found[f"fused {name}"] = str(error)
run_generate(
    out_dir="generated", checkpoint=checkpoint, prompt=["The river runs"],
    max_new_tokens=12, trace="trace.csv.gz",
    offload=OffloadOptions(device_memory="50%", eviction="my_decayed"),
)
print(json.dumps(found))
"""

SIMULATORS = """
import json, sys
from moe_edge.loadtest.run_load import run_load
from moe_edge.place.run_place import run_place
from moe_edge.simulate.cluster.build import build_scenario
from moe_edge.simulate.cluster.loop import ClusterLoop, LoopOptions
from moe_edge.simulate.cluster.offload import OffloadPolicy
from moe_edge.simulate.cluster.run import run_simulate
from moe_edge.simulate.replay.run import run_replay

_, checkpoint, costs = sys.argv
found = {}
found["replay"] = run_replay(
    out_dir="replayed", trace="trace.csv.gz", slots_per_layer="4",
    policies="my_decayed,lru", predictors="my_followers",
    policy_options={"my_decayed": {"keep": 0.5}},
)
found["all"] = run_replay(
    out_dir="replayed_all", trace="trace.csv.gz", slots_per_layer="4",
)
found["place"] = run_place(out_dir="placed", methods="my_favourites,optimal")
few = {"requests_per_server": 2, "interval_s": 1.0}
found["simulate"] = run_simulate(
    out_dir="simulated", methods="my_favourites,optimal", period_s=5.0,
    placer_options={"my_favourites": {"copies": False}}, **few,
)
case = build_scenario(**few, seed=0)
offload = OffloadPolicy(eviction="my_decayed", predictor="my_followers")
loop = ClusterLoop(
    case.requests, None, case.cost_model, case.pools, LoopOptions(), 0, offload=offload
)
loop.run()
found["served alone"] = {"hit_ratio": loop.memory.hit_ratio}
load = {"poisson": 50.0, "duration_s": 0.2, "seed": 3, "policy": "my_shortest_first"}
found["computed"] = run_load(
    out_dir="computed", target="computed", costs=costs,
    policy_options={"patience_s": 1.0}, **load,
)
print(json.dumps(found, default=str))
"""


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """A folder elsewhere, and the environment in which the package is installed."""
    folder = tmp_path_factory.mktemp("outside")
    target = folder / "site"
    copy = folder / "my_policies"  # building leaves files beside the sources
    copy.mkdir()
    subprocess.run(["cp", "-r", f"{EXAMPLE}/.", str(copy)], check=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
        + ["--no-build-isolation", "--target", str(target), str(copy)],
        check=True,
        timeout=WAIT_S,
    )
    paths = os.pathsep.join([str(target), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": paths}
    write_tiny_checkpoint(folder / "tiny")
    machine = folder / "machine.json"
    machine.write_text(json.dumps({"step_costs": COSTS.to_json()}))
    return folder, environment


def run(outside, *arguments) -> str:
    """The last line of what Python printed."""
    folder, environment = outside
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_its_own_tests_pass(outside):
    folder, _ = outside
    said = run(outside, "-m", "pytest", "-q", folder / "my_policies")
    assert "passed" in said and "failed" not in said


@pytest.fixture(scope="module")
def engines(outside):
    return json.loads(run(outside, "-c", ENGINES, outside[0] / "tiny"))


def test_every_engine_runs_them_by_name(engines):
    for name in ("layered", "fused", "assist", "lossless route"):
        assert engines[name]["equal"], name
    for name in ("layered route", "fused route"):
        assert engines[name]["route"] == "my_drop_last", name
    for name in engines:
        if not name.startswith(("fused p", "fused a")):
            assert engines[name]["eviction"] == "my_decayed", name
            assert engines[name]["new"] == 12, name
    assert engines["layered"]["predictor"] == "my_followers"
    assert engines["assist"]["host_computed"] > 0
    for name in ("predictor", "assist"):
        said = f"mode fused has no {name}; use mode layered"
        assert engines[f"fused {name}"] == said


def test_replay_simulator_and_load_run_them_by_name(engines, outside):
    folder, _ = outside
    given = folder / "tiny", folder / "machine.json"
    found = json.loads(run(outside, "-c", SIMULATORS, *given))
    assert 0 < found["replay"]["hit_ratio"]["my_decayed"]["4"] < 1
    assert 0 < found["replay"]["recall"]["my_followers"]["1"] <= 1
    assert {"my_decayed", "lru"} <= found["all"]["hit_ratio"].keys()
    assert "my_followers" in found["all"]["recall"]
    placed = found["place"]["methods"]
    assert placed["my_favourites"]["coverage"] == placed["optimal"]["coverage"]
    assert placed["my_favourites"]["gap_pct"] >= 0
    assert found["simulate"]["methods"]["my_favourites"]["mean_latency_s"] > 0
    assert 0 < found["served alone"]["hit_ratio"] < 1
    assert found["computed"]["decisions_equal"] is True
    assert found["computed"]["outcomes"] == {"finished": found["computed"]["requests"]}


def test_command_and_cluster_know_the_names(outside):
    main = "-m", "moe_edge.commands.main"
    budget = "--checkpoint", "tiny", "--device_memory", "50%"
    asked = "--prompt", "The river", "--max_new_tokens", 6, "--out_dir", "by_command"
    policy = "--gin_param", "offload.eviction = 'my_decayed'"
    options = "--gin_param", "offload.eviction_options = {'keep': 0.7}"
    done = run(outside, *main, "generate", *budget, *asked, *policy, *options)
    assert 0 < json.loads(done)["hit_ratio"] < 1
    lines = [{"id": str(n), "prompt": "The river runs"} for n in range(2)]
    text = "\n".join(json.dumps(line) for line in lines)
    (outside[0] / "prompts.jsonl").write_text(text + "\n")
    served = "--prompts", "prompts.jsonl", "--max_new_tokens", 6, "--slots", "12,12"
    where = "--checkpoint", "tiny", "--servers", 2, "--out_dir", "cluster"
    methods = "--methods", "my_favourites,optimal", "--join_timeout_s", 300
    done = run(outside, *main, "cluster", *where, *methods, *served)
    summary = json.loads(done)
    assert summary["lost_requests"] == 0
    assert [*summary["methods"]] == ["my_favourites", "optimal"]


@contextlib.contextmanager
def server(outside, *flags):
    """A server as a process: what it printed when it was ready."""
    folder, environment = outside
    with (folder / "server_err").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "moe_edge.commands.main", "serve", *flags],
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            cwd=folder,
            env=environment,
        )
    try:
        line = process.stdout.readline()
        assert line, (folder / "server_err").read_text()
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()


def test_server_runs_them_by_name(outside):
    from tests.launch.test_serve import ask

    flags = "--checkpoint", "tiny", "--device_memory", "50%", "--port", "0"
    flags += "--policy", "my_shortest_first", "--max_batch", "2", "--max_context", "64"
    flags += "--gin_param", "offload.eviction = 'my_decayed'"
    flags += "--gin_param", "serving.policy_options = {'patience_s': 1.0}"
    with server(outside, *flags) as (process, ready):
        body = {"prompt": "The river", "max_tokens": 9, "ignore_eos": True}
        status, raw = ask(ready["url"], "POST", "/v1/completions", body)
        assert status == 200, raw
        assert json.loads(raw)["usage"]["completion_tokens"] == 9
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
        assert json.loads(out.splitlines()[-1])["outcomes"]["finished"] == 1

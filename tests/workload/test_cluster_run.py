"""Files of a cluster's run: written, read back, refused."""

import dataclasses
import json
import math

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.place.call_targets import call_targets
from moe_edge.place.plan import Placement
from moe_edge.workload.cluster_run import (
    FROM_CHECKPOINT,
    ClusterFacts,
    RequestRow,
    TableChange,
    join_traces,
    locality,
    method_file,
)
from moe_edge.workload.cluster_run_reader import ClusterRun
from moe_edge.workload.trace_reader import read_trace
from tests.support.cluster_runs import calibration, cluster_trace, facts, write_run
from tests.support.traces import make_trace

# Server 0 holds blocks 0 and 1 of both layers, server 1 blocks 2 and 3.
PLACED = Placement(np.array([[[0, 0, -1, -1]] * 2, [[-1, -1, 0, 0]] * 2]))
TARGETS = call_targets(PLACED.on_NLE)
A = [[[0, 1], [2, 0]], [[0, 2], [1, 0]], [[3, 2], [0, 1]]]  # [T, L, K]
B = [[[1, 2], [3, 0]], [[0, 3], [3, 2]]]
SERVED = [
    RequestRow(0, "words", 0.0, 1.0, 2.5),
    RequestRow(1, "stories", 0.5, 1.25, 4.0),
]
CHANGES = [
    TableChange(t_s=1.5, version=1, moves=[[0, 1, 2]], sources=[1], begun_s=1.0),
    TableChange(
        t_s=2.0,
        version=2,
        moves=[(1, 1, 0)],
        drops=[[0, 1, 0]],
        sources=[FROM_CHECKPOINT],
    ),
]


def traced():
    return cluster_trace([A, B], servers=[0, 1], prompts=[2, 1], holder_XLE=TARGETS)


@pytest.fixture
def folder(tmp_path):
    run = tmp_path / "run"
    write_run(run, facts(), calibration(), PLACED, SERVED, traced(), CHANGES)
    return run


def edit(folder, name, change):
    path = folder / name
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def test_a_run_is_read_back_whole(folder):
    run = ClusterRun(folder)
    assert run.facts == facts() and run.calibration == calibration()
    got = run.method("optimal")
    assert got.served == SERVED
    lengths = [(r.id, r.server, r.input_tokens, r.output_tokens) for r in got.requests]
    assert lengths == [(0, 0, 2, 2), (1, 1, 1, 2)]
    assert [(r.domain, r.arrival_s) for r in got.requests] == [
        ("words", 0.0),
        ("stories", 0.5),
    ]
    assert got.first_R.tolist() == [0, 3]
    assert got.ids_TLK.tolist() == A + B
    as_lists = [dataclasses.asdict(change) for change in got.changes]
    expected = [dataclasses.asdict(change) for change in CHANGES]
    assert json.loads(json.dumps(as_lists)) == json.loads(json.dumps(expected))
    placed = Placement.load(got.placement)
    assert (placed.gpu_NLE == PLACED.gpu_NLE).all()
    assert got.trace.version.tolist() == [0] * 10
    assert got.calibration is run.calibration


def test_a_method_has_costs_of_its_own(folder):
    own, file = calibration(dense_s=3.0), method_file("calibration", "optimal")
    own.save(folder, file)
    run = ClusterRun(folder)
    assert run.calibration == calibration() and run.method("optimal").calibration == own
    calibration(3).save(folder, file)
    with pytest.raises(ConfigError, match="_optimal.json is of 3 servers, cluster.js"):
        run.method("optimal")


def test_a_trace_says_who_asked_and_who_computed(folder):
    path = folder / method_file("trace", "optimal")
    trace = read_trace(path)
    assert trace.server.tolist() == [0] * 6 + [1] * 4
    assert trace.holder_TK.tolist() == traced().holder_TK.tolist()
    assert trace.holder_TK[:2].tolist() == [[0, 0], [1, 0]]


def test_locality_counts_pairs_and_blocks_a_step_and_layer():
    # Request 0, prompt: (0,1),(0,2) | (2,0),(1,0): block 2 of both layers. Then 3 and
    # 2 of layer 0. Request 1 at server 1, prompt: 1 | 0. Then 0 | none.
    found = locality(traced(), chunk_tokens=16)
    assert (found.pairs, found.local_pairs, found.remote_calls) == (20, 13, 7)
    assert found.local_ratio == 13 / 20
    # The same prompt once more in one step asks for block 2 of layer 0 twice.
    twice = cluster_trace([[A[1], A[1]]], [0], [2], TARGETS)
    assert locality(twice, 16).remote_calls == 1
    assert locality(twice, 1).remote_calls == 2


def test_steps_of_servers_are_kept_apart():
    first, second = (
        cluster_trace([ids], [n], [1], TARGETS) for n, ids in enumerate((A, B))
    )
    joined = join_traces([first, second])
    assert joined.step.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert joined.server.tolist() == [0, 0, 1, 1] * 2 + [0, 0]
    assert locality(joined, 16).remote_calls == 7
    with pytest.raises(ConfigError, match="no trace to join"):
        join_traces([])
    plain = make_trace([(0, 0, 0, [1, 2])])
    with pytest.raises(ConfigError, match=r"trace 1 has .*\(4, 2, \['ids_TK'"):
        join_traces([first, plain])


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("cluster.json", {"format_version": 2}, "format_version is 2, expected 1"),
        ("cluster.json", {"slots": None}, "slots is None, expected a list"),
        ("cluster.json", {"top_k": 1}, r"has \(layers, top k\) \(2, 2\), .* \(2, 1\)"),
        (
            "cluster.json",
            {"slots": [4]},
            "calibration.json is of 2 servers, .* slots of 1",
        ),
        ("cluster.json", {"methods": ["../x"]}, "'../x' cannot be part of a file's"),
        ("cluster.json", {"num_experts": 5}, "num_experts=4, --num_experts says 5"),
        ("calibration.json", {"format_version": 0}, "format_version is 0, expected 1"),
        ("calibration.json", {"source": 1}, "calibration: source is 1, expected a"),
        ("calibration.json", {"servers": []}, "needs at least one server, got none"),
        ("calibration.json", {"servers": [{}, {}]}, "server 0 lacks buckets"),
        ("calibration.json", {"servers": 1}, "servers is 1, expected a list"),
        ("calibration.json", {"messages": {}}, "messages lacks base_s"),
        ("calibration.json", {"messages": [1]}, r"messages is \[1\], expected names"),
        ("calibration.json", {"cores": [0]}, "cores of a machine must be a positive"),
        (
            "calibration.json",
            {"hosts": [0, 2]},
            r"hosts are \[0, 2\], expected one of 2",
        ),
        (
            "calibration.json",
            {"message_slowdown": [1.0, 0.0]},
            "message_slowdown must be .* got 0.0",
        ),
        ("calibration.json", {"more": 1}, "calibration has no option 'more'"),
    ],
)
def test_stated_facts_that_cannot_be_are_refused(folder, name, change, message):
    edit(folder, name, lambda stored: stored | change)
    with pytest.raises(ConfigError, match=message) as caught:
        ClusterRun(folder).method("optimal")
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "bucket, message",
    [
        ({"tokens": 0}, "bucket tokens must be a positive whole number, got 0"),
        ({"tokens": 2}, r"buckets are of \[2, 16\] tokens, expected rising .* from 1"),
        ({"dense_s": -1.0}, "dense_s of bucket 1 must be 0 or more and finite, got -1"),
        ({"dense_s": 0.0}, "dense_s of bucket 1 must be positive"),
        ({"pair_s": 0.0}, r"block_s \+ pair_s of bucket 1 must be positive"),
        ({"pair_s": "x"}, "server 0: bucket: pair_s is 'x', expected a number"),
        ({"speed": 1.0}, "server 0: bucket has no option 'speed'"),
    ],
)
def test_costs_that_cannot_be_are_refused(folder, bucket, message):
    def change(stored):
        stored["servers"][0]["buckets"][0] |= bucket
        return stored

    edit(folder, "calibration.json", change)
    with pytest.raises(ConfigError, match=message):
        ClusterRun(folder)


def test_servers_with_other_buckets_are_refused(folder):
    def change(stored):
        stored["servers"][1]["buckets"].pop()
        return stored

    edit(folder, "calibration.json", change)
    with pytest.raises(ConfigError, match=r"server 1 has buckets of \[1\] tokens, ser"):
        ClusterRun(folder)


HEAD = "server,domain,arrival_s,first_token_s,latency_s\n"


@pytest.mark.parametrize(
    "kind, text, message",
    [
        ("requests", "a,b\n", "begins 'a,b', expected server,domain,arrival_s"),
        ("requests", HEAD, "has no request"),
        ("requests", HEAD + "0,a,0.5,1\n", "request 0 is '0,a,0.5,1', expected server"),
        ("requests", HEAD + "0,a,0.5,1,\n", "request 0 has no latency: it was lost"),
        ("requests", HEAD + "0,a,nan,1,1\n", r"request 0 has times \[nan, 1.0, 1.0\]"),
        (
            "requests",
            HEAD + "0,a,2,1,1\n1,a,1,1,1\n",
            "request 1 arrives before the one above",
        ),
        ("requests", HEAD + "0,a,0,1,1\n", "trace_optimal.csv.gz: request 1, expected"),
        (
            "requests",
            HEAD + "0,a,0,1,1\n" + "1,a,0,1,1\n" * 2,
            "trace_optimal.csv.gz: request 2 has no row of its prompt",
        ),
        ("migrations", "{", ".jsonl:1 is not valid JSON"),
        ("migrations", "[1]", r":1 is \[1\], expected names and values"),
        ("migrations", '{"t_s": 1}', ":1 lacks version"),
        (
            "migrations",
            '{"t_s": 1, "version": 2, "moves": []}',
            ":1 is version 2 at 1 s, expected version 1",
        ),
        (
            "migrations",
            '{"t_s": 1, "version": 1, "moves": [[0, 2, 0]]}',
            r":1: \[0, 2, 0\] is no \(server, layer, block\) below \[2, 2, 4\]",
        ),
        (
            "migrations",
            '{"t_s": 1, "version": 1, "moves": [[0, 1, 0]], "sources": [2]}',
            ":1: source 2, expected -1 to 1",
        ),
        (
            "migrations",
            '{"t_s": 1, "version": 1, "moves": [[0, 1, 0]], "sources": [0, 0]}',
            "2 sources for 1 moves; give each",
        ),
        ("migrations", '{"t_s": -1, "version": 1, "moves": []}', "t_s must be 0 or mo"),
    ],
)
def test_lines_that_cannot_be_are_refused(folder, kind, text, message):
    (folder / method_file(kind, "optimal")).write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        ClusterRun(folder).method("optimal")
    assert "\n" not in str(caught.value)


def test_what_is_no_run_or_no_text_is_refused(tmp_path, folder):
    with pytest.raises(ConfigError, match="holds no cluster.json, so it is no run"):
        ClusterRun(tmp_path)
    with pytest.raises(ConfigError, match="unknown method of the run 'prism'; known"):
        ClusterRun(folder).method("prism")
    (folder / method_file("requests", "optimal")).write_bytes(b"\xff")
    with pytest.raises(RequestError, match="is not UTF-8 text"):
        ClusterRun(folder).method("optimal")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"server": None}, "it has no columns server and holder"),
        ({"server": np.full(10, 2, np.int32)}, "server 2, expected 0 to 1"),
        ({"server": np.zeros(10, np.int32)}, "request 1 came to server 1 and was serv"),
        ({"holder_TK": np.full((10, 2), 5, np.int32)}, "experts of holders 0 to 1"),
        ({"step": np.zeros(10, np.int32)}, "step 0, layer 0, server 0 comes twice"),
        ({"step": np.arange(10)[::-1]}, "did not pass each of the 2 layers"),
    ],
)
def test_traces_of_other_runs_are_refused(tmp_path, change, message):
    trace = dataclasses.replace(traced(), **change)
    write_run(tmp_path / "r", facts(), calibration(), PLACED, SERVED, trace)
    with pytest.raises(ConfigError, match=message):
        ClusterRun(tmp_path / "r").method("optimal")


def test_lost_requests_are_written_as_nothing(folder):
    served = [SERVED[0], RequestRow(1, "stories", 0.5, math.nan, math.nan)]
    write_run(folder, facts(), calibration(), PLACED, served, traced())
    lines = (folder / method_file("requests", "optimal")).read_text().splitlines()
    assert lines[2] == "1,stories,0.500000,,"


def test_facts_may_say_more(folder):
    facts().save(folder, {"mode": "prism", "link_mbps": 500.0})
    stored = json.loads((folder / "cluster.json").read_text())
    assert stored["mode"] == "prism" and stored["format_version"] == 1
    assert ClusterRun(folder).facts == facts()
    with pytest.raises(ConfigError, match="slots is empty"):
        ClusterFacts(**(vars(facts()) | {"slots": []}))

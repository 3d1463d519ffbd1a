"""Real runs in computed time; here the runs are made up, or the simulator's own."""

import dataclasses
import json

import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.hardware.cluster_calibration import BucketCosts, ServerCosts
from moe_edge.hardware.measured_costs import MeasuredCosts
from moe_edge.place.call_targets import call_targets
from moe_edge.place.plan import Placement
from moe_edge.simulate.cluster.loop import ClusterLoop, LoopOptions
from moe_edge.simulate.cluster.pools import RoutingPools
from moe_edge.simulate.cluster.report import ClusterResult
from moe_edge.simulate.cluster.run import run_simulate
from moe_edge.workload.cluster_run import RequestRow, TableChange, method_file
from moe_edge.workload.cluster_run_reader import read_requests
from moe_edge.workload.requests import Request
from tests.support.cluster_runs import calibration, cluster_trace, facts, write_run

# One layer of four blocks, two a token: blocks 0 and 1 on server 0, the others on 1.
HALF = Placement(np.array([[[0, 0, -1, -1]], [[-1, -1, 0, 0]]]))
ONE_LAYER = facts(num_layers=1)


def replay(
    tmp_path, costs, served, ids, prompts, of=ONE_LAYER, changes=None, **options
):
    """The row of a made-up run, and its folders (the run's and the simulated one)."""
    servers, number = [one.server for one in served], len(list(tmp_path.iterdir()))
    trace = cluster_trace(ids, servers, prompts, call_targets(HALF.on_NLE))
    run, out = tmp_path / f"run{number}", tmp_path / f"out{number}"
    write_run(run, of, costs, HALF, served, trace, changes)
    rows = run_simulate(cluster_run=str(run), out_dir=str(out))["methods"]
    return rows["optimal"], run, out


def finished(folder):
    """When requests of a folder had their first and last token."""
    served = read_requests(folder / method_file("requests", "optimal"))
    return [(s.arrival_s + s.first_token_s, s.arrival_s + s.latency_s) for s in served]


def test_software_takes_its_time(tmp_path):
    overheads = {"split_s": 0.0625, "head_s": 1.0, "call_s": 0.125}
    costs = calibration(messages={"each_s": 0.03125}, **overheads)
    served = [RequestRow(0, "a", 0.0, 1.0, 5.0)]
    row, _, out = replay(tmp_path, costs, served, [[[[0, 2]], [[3, 2]]]], [1])
    # Dense and split to .5625, sent at .59375, there at .78125 (16 bytes at 128 a
    # second, half of base_s); call and block to 1.15625, back at 1.34375; head. Then
    # two blocks, one state there and two rows back: sent at 2.9375, computed at 3.75.
    assert finished(out) == [(2.34375, 5.0625)]
    assert (row["payload_bytes"], row["activation_bytes"]) == (16 * 5, 16 * 5)
    assert (row["local_ratio"], row["remote_calls"]) == (0.25, 3)
    assert row["measured_local_ratio"] == 0.25 and row["measured_remote_calls"] == 3
    assert row["measured_latency_s"] == 5.0
    assert row["error_pct"] == pytest.approx(1.25)
    # Of the decode call: .03125 + .1875 there, .25 + .0625 back.
    assert row["call_overhead_s"] == 0.53125
    assert row["tokens_per_s"] == pytest.approx(2 / 5.0625)
    events = (out / method_file("events", "optimal")).read_text().splitlines()
    first = {k: v for k, v in json.loads(events[0]).items() if v is not None}
    assert first == {
        **{"t_s": 0.5625, "dur_s": 0.78125, "kind": "call", "request": 0},
        **{"layer": 0, "server": 1, "bytes": 32},
    }


def test_a_layer_of_own_blocks_is_not_split(tmp_path):
    costs = calibration(split_s=9.0, call_s=9.0, messages={"each_s": 9.0})
    served = [RequestRow(1, "a", 0.5, 1.0, 5.0)]
    row, _, out = replay(tmp_path, costs, served, [[[[3, 2]], [[3, 2]]]], [1])
    assert finished(out) == [(1.5, 2.5)]
    assert row["call_overhead_s"] is None and row["local_ratio"] == 1


def test_messages_carry_a_state_once_and_leave_one_after_another(tmp_path):
    # Three tokens in one bucket of 16: block 2 of two tokens, block 3 of one of them.
    sizes = {"call_bytes": 64, "pair_bytes": 32, "each_s": 0.25}
    served = [RequestRow(0, "a", 0.0, 1.0, 5.0)]
    ids = [[[[0, 1]], [[2, 3]], [[1, 2]]]]
    row, _, out = replay(tmp_path, calibration(messages=sizes), served, ids, [3])
    there, back = 64 + 2 * 16 + 3 * 32, 3 * 16
    assert row["payload_bytes"] == there + back
    assert row["activation_bytes"] == 2 * 16 + 3 * 16
    took_s = 0.5 + 0.25 + there / 128 + 0.0625 + 3 * 0.25 + back / 128 + 0.0625
    assert finished(out) == [(took_s, took_s)]


def test_long_prompts_pass_in_chunks_and_only_the_last_has_a_head(tmp_path):
    buckets = [
        BucketCosts(tokens=1, dense_s=0.25, pair_s=0.125, head_s=1.0),
        BucketCosts(tokens=2, dense_s=0.5, pair_s=0.25, block_s=1.0, head_s=2.0),
    ]
    costs = calibration()
    servers = [ServerCosts(buckets=buckets, load_s=1.0)] * 2
    costs = type(costs)(servers=servers, messages=costs.messages, source="test")
    served = [RequestRow(0, "a", 0.0, 1.0, 5.0)]
    chunks = facts(num_layers=1, chunk_tokens=2)
    ids = [[[[0, 1]], [[0, 1]], [[1, 0]], [[0, 1]]]]
    _, _, out = replay(tmp_path, costs, served, ids, [3], of=chunks)
    first_s = 0.5 + 2 * 1.0 + 4 * 0.25  # two blocks, four pairs
    second_s = first_s + 0.25 + 2 * 0.125 + 1.0
    assert finished(out) == [(second_s, second_s + 1.5)]


def test_requests_of_a_server_take_turns(tmp_path):
    served = [RequestRow(0, "a", 0.0, 1.0, 5.0), RequestRow(0, "b", 0.25, 1.0, 5.0)]
    ids = [[[[0, 1]]] * 2, [[[1, 0]]] * 2]
    pair = facts(num_layers=1, max_batch=2)
    _, _, out = replay(tmp_path, calibration(), served, ids, [1, 1], of=pair)
    # A token takes a second: one of the first, then one of each in turn.
    assert finished(out) == [(1.0, 2.0), (3.0, 4.0)]
    _, _, out = replay(tmp_path, calibration(), served, ids, [1, 1])
    assert finished(out) == [(1.0, 2.0), (3.0, 4.0)]
    ids[0] = [[[0, 1]]] * 3
    _, _, out = replay(tmp_path, calibration(), served, ids, [1, 1], of=pair)
    assert finished(out) == [(1.0, 4.0), (3.0, 5.0)]


def test_tables_change_when_they_did(tmp_path):
    served = [RequestRow(0, "a", 0.0, 1.0, 5.0)]
    changes = [
        TableChange(
            t_s=2.0,
            version=1,
            moves=[[0, 0, 2], [1, 0, 0]],
            drops=[[1, 0, 2]],
            sources=[1, -1],
            begun_s=1.5,
        )
    ]
    ids = [[[[0, 2]]] * 3]
    costs = calibration()
    row, _, out = replay(tmp_path, costs, served, ids, [1], changes=changes)
    # .5 + .125 + .0625 + .25 + .125 + .0625 = 1.125, twice: the second token had begun
    # when block 2 came; then all is local.
    assert finished(out) == [(1.125, 3.25)]
    assert (row["local_ratio"], row["moved_blocks"]) == (4 / 6, 2)
    assert row["measured_local_ratio"] == 0.5  # of the made-up trace
    events = (out / method_file("events", "optimal")).read_text().splitlines()
    moved = [e for e in map(json.loads, events) if e["kind"] == "transfer"]
    assert [(e["t_s"], e["dur_s"], e["server"], e["cause"]) for e in moved] == [
        (1.5, 0.5, 0, "migrate"),
        (1.5, 0.5, 1, "migrate"),
    ]
    gone = [TableChange(t_s=1.0, version=1, moves=[], drops=[[1, 0, 2]])]
    with pytest.raises(ConfigError, match="version 1: 1 blocks are on no server"):
        replay(tmp_path, costs, served, ids, [1], changes=gone)


@pytest.fixture(scope="module")
def own():
    """A run of the simulator on three servers: requests, placement, costs, result."""
    rng = np.random.default_rng(3)
    N, L, E, K = 3, 2, 6, 2
    order = np.argsort(rng.random((40, L, E)), axis=2)
    pools = RoutingPools({"a": order[..., :K], "b": order[::-1, :, :K]}, E)
    arrivals = np.cumsum(rng.random(12) * 6).round(3)
    requests = [
        Request(i, i % N, float(t), int(rng.integers(1, 9)), int(rng.integers(1, 6)),
                "ab"[i % 2])
        for i, t in enumerate(arrivals)
    ]  # fmt: skip
    on_NLE = rng.random((N, L, E)) < 0.4
    on_NLE[0] |= ~on_NLE.any(axis=0)
    placement = Placement(np.where(on_NLE, 0, -1))
    overheads = {"split_s": 0.01, "head_s": 0.1, "call_s": 0.02, "block_s": 0.03}
    costs = calibration(N, messages={"each_s": 0.015, "call_bytes": 5}, **overheads)
    of = facts(slots=[12] * N, num_experts=E)
    model = MeasuredCosts.of(costs, of.slots, of.block_bytes)
    loop = ClusterLoop(requests, placement, model, pools, LoopOptions(), 7)
    loop.run()
    ids = []
    for request, row in zip(requests, loop.rows.tolist(), strict=True):
        tokens = request.input_tokens + request.output_tokens - 1
        cells = pools.cells(request.domain, row, tokens).reshape(tokens, L, K)
        ids.append((cells - np.arange(L)[:, None] * E).tolist())
    return requests, placement, of, costs, ids, loop


def test_the_simulators_own_run_comes_out_again(tmp_path, own):
    requests, placement, of, costs, ids, loop = own
    result = ClusterResult(loop)
    trace = cluster_trace(
        ids,
        [request.server for request in requests],
        [request.input_tokens for request in requests],
        loop.table.target_NX.reshape(placement.gpu_NLE.shape),
        num_experts=of.num_experts,
    )
    run, out = tmp_path / "run", tmp_path / "out"
    write_run(run, of, costs, placement, result.served, trace)
    again = run_simulate(cluster_run=str(run), out_dir=str(out))["methods"]["optimal"]
    assert result.remote_calls > 20 and 0.2 < result.local_ratio < 0.8
    for name in ("local_ratio", "remote_calls"):
        assert again[name] == again[f"measured_{name}"] == getattr(result, name)
    assert abs(again["error_pct"]) < 1e-4
    files = [folder / method_file("requests", "optimal") for folder in (run, out)]
    for before, after in zip(*map(read_requests, files), strict=True):
        assert before[:2] == after[:2]
        np.testing.assert_allclose(before[2:], after[2:], atol=2e-6)


def test_software_is_what_the_difference_is(own):
    requests, placement, of, costs, _, loop = own
    none = {"split_s": 0.0, "head_s": 0.0, "call_s": 0.0}
    buckets = [dataclasses.replace(b, **none) for b in costs.servers[0].buckets]
    bare = type(costs)(
        servers=[ServerCosts(buckets=buckets, load_s=1.0)] * 3,
        messages=type(costs.messages)(**(vars(costs.messages) | {"each_s": 0.0})),
        source="test",
    )
    model = MeasuredCosts.of(bare, of.slots, of.block_bytes)
    faster = ClusterLoop(requests, placement, model, loop.pools, LoopOptions(), 7)
    faster.run()
    assert (faster.finish_R < loop.finish_R - 0.1).all()


def test_a_run_of_servers_that_serve_alone_has_nothing_to_simulate(tmp_path):
    served, ids = [RequestRow(0, "a", 0.0, 1.0, 5.0)], [[[[0, 2]]]]
    _, run, _ = replay(tmp_path, calibration(), served, ids, [1])
    facts(methods=["moe_infinity", "moe_infinity_lb"]).save(run)
    with pytest.raises(ConfigError, match="its servers made no calls"):
        run_simulate(cluster_run=str(run), out_dir=str(tmp_path / "o2"))


def test_what_a_run_says_itself_is_refused(tmp_path):
    served, ids = [RequestRow(0, "a", 0.0, 1.0, 5.0)], [[[[0, 2]]]]
    _, run, out = replay(tmp_path, calibration(), served, ids, [1])
    refused = {
        "seeds, model would have no effect": {"model": "mixtral_8x7b", "seeds": 2},
        "period_s would have no effect with a cluster_run": {"period_s": 3.0},
        "max_batch would have no effect": {"max_batch": 2},
        "unknown method of the run 'prism'; known: optimal": {"methods": "prism"},
        "holds no cluster.json": {"cluster_run": str(out)},
    }
    for message, options in refused.items():
        given = {"cluster_run": str(run), "out_dir": str(tmp_path / "o")} | options
        with pytest.raises(ConfigError, match=message):
            run_simulate(**given)
    dry = run_simulate(
        cluster_run=str(run), out_dir=str(tmp_path / "o"), dry_run=True, timeline_s=1.0
    )
    assert dry["methods"] == ["optimal"] and not (tmp_path / "o").exists()


def test_placements_of_other_clusters_are_refused(tmp_path):
    served, ids = [RequestRow(0, "a", 0.0, 1.0, 5.0)], [[[[0, 2]]]]
    _, run, _ = replay(tmp_path, calibration(), served, ids, [1])
    stem = run / method_file("placement", "optimal")
    Placement(np.zeros((2, 2, 4))).save(stem)
    with pytest.raises(ConfigError, match=r"has shape \(2, 2, 4\), the run has"):
        run_simulate(cluster_run=str(run), out_dir=str(tmp_path / "o"))
    facts(num_layers=1, slots=[1, 4]).save(run)
    HALF.save(stem)
    with pytest.raises(CapacityError, match="GPU 0 of server 0 is given 2 blocks, it"):
        run_simulate(cluster_run=str(run), out_dir=str(tmp_path / "o"))


def test_threads_of_a_machine_share_its_cores(tmp_path):
    # Both servers ask themselves; on one core the second waits for the first's half.
    served = [RequestRow(0, "a", 0.0, 1.0, 5.0), RequestRow(1, "a", 0.0, 1.0, 5.0)]
    ids = [[[[0, 1]]], [[[2, 3]]]]
    alone = calibration()
    for hosts, cores, ends in (
        ([0, 1], [1, 1], [1.0, 1.0]),
        ([0, 0], [2], [1.0, 1.0]),
        ([0, 0], [1], [1.5, 2.0]),
    ):
        costs = dataclasses.replace(alone, hosts=hosts, cores=cores)
        _, _, out = replay(tmp_path, costs, served, ids, [1, 1])
        assert [last for _, last in finished(out)] == ends


def test_servers_with_requests_slow_each_other_down(tmp_path):
    # Each computes half of the other's blocks and has a core for each thread.
    costs = calibration(messages={"bytes_per_s": 2.0**40, "each_s": 0.125})
    costs = dataclasses.replace(costs, cores=[2, 2])
    served = [RequestRow(0, "a", 0.0, 1.0, 5.0), RequestRow(1, "a", 8.0, 1.0, 5.0)]
    ids = [[[[0, 2]]], [[[3, 1]]]]
    alone_s = 0.5 + 0.125 + 0.125 + 0.25
    slower = {"compute_slowdown": [2.0, 4.0], "message_slowdown": [1.0, 3.0]}
    both_s = 4 * (0.5 + 0.25) + 3 * 0.25
    for more, gap_s, ends in (
        ({}, 8.0, [alone_s, 8 + alone_s]),
        ({}, 0.0, [alone_s, alone_s]),
        (slower, 8.0, [1.75, 9.75]),  # twice the computation, messages as before
        (slower, 0.0, [both_s, both_s]),
        ({"compute_slowdown": [2.0]}, 0.0, [1.75, 1.75]),  # of two as of one
    ):
        served[1] = served[1]._replace(arrival_s=gap_s)
        given = dataclasses.replace(costs, **more)
        _, _, out = replay(tmp_path, given, served, ids, [1, 1])
        assert [last for _, last in finished(out)] == pytest.approx(ends, abs=1e-6)


def test_own_blocks_begin_when_the_messages_are_sent(tmp_path):
    slow = [BucketCosts(tokens=t, dense_s=0.5, pair_s=4.0) for t in (1, 16)]
    quick = [BucketCosts(tokens=t, dense_s=0.5, pair_s=0.25) for t in (1, 16)]
    costs = calibration(messages={"each_s": 0.25})
    servers = [ServerCosts(buckets=each, load_s=1.0) for each in (slow, quick)]
    costs = dataclasses.replace(costs, servers=servers)
    served = [RequestRow(0, "a", 0.0, 1.0, 5.0)]
    _, _, out = replay(tmp_path, costs, served, [[[[0, 2]]]], [1])
    assert finished(out) == [(4.75, 4.75)]


def test_a_server_answers_one_call_after_another(tmp_path):
    # Both others ask server 2 for block 2 at once; it has cores enough.
    on = np.array([[[1, 1, 0, 0]], [[1, 1, 0, 0]], [[0, 0, 1, 1]]], bool)
    costs = dataclasses.replace(
        calibration(3, messages={"base_s": 0.0, "bytes_per_s": 2.0**40}),
        cores=[8, 8, 8],
    )
    served = [RequestRow(n, "a", 0.0, 1.0, 5.0) for n in (0, 1)]
    trace = cluster_trace([[[[0, 2]]]] * 2, [0, 1], [1, 1], call_targets(on))
    of, placement = facts(num_layers=1, slots=[4] * 3), Placement(np.where(on, 0, -1))
    write_run(tmp_path / "run", of, costs, placement, served, trace)
    run_simulate(cluster_run=str(tmp_path / "run"), out_dir=str(tmp_path / "out"))
    ends = [last for _, last in finished(tmp_path / "out")]
    assert ends == pytest.approx([0.75, 1.0], abs=1e-6)

"""What a run writes is what happened: recomputed from its files and from the model."""

import numpy as np
import pytest

from moe_edge.cluster.drills import Drill
from moe_edge.cluster.prism.outcome import (
    events_of,
    payload_bytes,
    summary_row,
    trace_of,
    write_method,
)
from moe_edge.cluster.scheduler.programme import served_rows
from moe_edge.cluster.transport.wire import Kind
from moe_edge.place.plan import Placement
from moe_edge.workload.cluster_run import ClusterFacts, locality, method_file
from moe_edge.workload.cluster_run_reader import read_migrations, read_requests
from moe_edge.workload.trace_reader import read_trace
from tests.support.live_cluster import (
    ALL,
    BITS,
    MOE_LAYERS,
    SLOTS,
    LiveCluster,
    Wandering,
    assert_tokens_of_one_machine,
    random_held,
    requests,
    resident_run,
)

CONFIG = ALL[BITS[0]]
E, K = CONFIG.moe.num_experts, CONFIG.moe.top_k
LENGTHS, NEW = (9, 40, 5, 12), 24


@pytest.fixture(scope="module")
def moving():
    """A run in whose midst blocks migrate, and its cluster's traffic."""
    tables = [random_held(3, seed) for seed in range(4)]
    with LiveCluster([SLOTS] * 3) as cluster:
        asked = requests(LENGTHS, NEW, 3)
        policy = Wandering(tables, 0.02, source="network")
        cluster.hold(asked[-1], {("from", "confirmed"): 2 * 3})  # of two rounds
        run = cluster.run(tables[0], asked, policy=policy)
        assert_tokens_of_one_machine(run.asked)
        run.sent, run.received = cluster.traffic(True), cluster.traffic(False)
        run.talk = list(cluster.scheduler.talk)
    assert run.keeper.table.moved > 0
    return run


def test_bytes_that_are_sent_are_received(moving):
    kinds = Kind.CALL, Kind.ROWS, Kind.BLOCK, Kind.RECORD
    for kind in kinds:
        sent = {key: count for key, count in moving.sent.items() if key[2] == kind}
        assert sent and sent == {
            k: v for k, v in moving.received.items() if k[2] == kind
        }
    calls = [moving.sent[key][1] for key in moving.sent if key[2] in kinds[:2]]
    assert payload_bytes([facts for facts, _ in moving.notes.values()]) == sum(calls)


def test_local_ratio_and_remote_calls_follow_from_the_written_trace(moving, tmp_path):
    write_method(tmp_path, "x", moving, E, K)
    trace = read_trace(tmp_path / method_file("trace", "x"), E)
    row, found = summary_row(moving, CONFIG.d_model), locality(trace, 512)
    assert found.local_ratio == row["local_ratio"] and 0 < found.local_ratio < 1
    assert found.remote_calls == row["remote_calls"] > 0
    tokens = sum(LENGTHS) + len(LENGTHS) * (NEW - 1)
    assert found.pairs == tokens * len(MOE_LAYERS) * K


def test_routing_in_the_trace_is_that_of_the_model_on_one_machine(moving):
    """Weights bit for bit: so are the hidden states of every layer and token."""
    trace = trace_of(moving, E, K)
    for one in moving.asked:
        mine = trace.request == one.id
        order = np.lexsort((trace.layer[mine], trace.step[mine], trace.phase[mine]))
        shape = -1, len(MOE_LAYERS), K
        _, ids, weights = resident_run(one.prompt, one.max_new_tokens)
        np.testing.assert_array_equal(trace.ids_TK[mine][order].reshape(shape), ids)
        found = trace.weights_TK[mine][order].reshape(shape)
        np.testing.assert_array_equal(found, weights)


def test_holders_in_the_trace_held_their_blocks_at_that_version(moving):
    """The table of a version, from the placement and the changes before it."""
    trace, held_NLE = trace_of(moving, E, K), moving.keeper.start_NLE.copy()
    held = {0: held_NLE.copy()}
    for change in moving.keeper.table.changes:
        for cells, there in ((change.moves, True), (change.drops, False)):
            for cell in cells:
                held_NLE[tuple(cell)] = there
        assert held_NLE.any(axis=0).all()
        held[change.version] = held_NLE.copy()
    assert len(set(trace.version.tolist())) > 1
    for version in np.unique(trace.version):
        rows = trace.version == version
        layer = np.searchsorted(MOE_LAYERS, trace.layer[rows])[:, None]
        # A drop is written with the version that asks for the copy no more.
        assert held[version][trace.holder_TK[rows], layer, trace.ids_TK[rows]].all()


def test_drops_are_told_when_all_have_confirmed(moving):
    confirmed, drops = {}, 0
    for way, server, name, fields in moving.talk:
        if (way, name) == ("from", "confirmed"):
            confirmed.setdefault(fields["version"], set()).add(server)
        elif name == "drop":
            assert confirmed[fields["version"]] == {0, 1, 2}
            drops += 1
    assert drops > 0


def test_versions_rise_and_are_read_again(moving, tmp_path):
    write_method(tmp_path, "x", moving, E, K)
    facts = ClusterFacts(
        methods=["x"],
        slots=[SLOTS - 1] * 3,
        num_layers=len(MOE_LAYERS),
        num_experts=E,
        top_k=K,
        block_bytes=1,
    )
    changes = read_migrations(tmp_path / method_file("migrations", "x"), facts)
    assert len(changes) == moving.keeper.table.version > 1
    assert sum(len(change.moves) for change in changes) == moving.keeper.table.moved
    assert any(source >= 0 for change in changes for source in change.sources)
    start = Placement.load(tmp_path / method_file("placement", "x"))
    np.testing.assert_array_equal(start.on_NLE, moving.keeper.start_NLE)


def test_requests_are_written_with_their_latencies(moving, tmp_path):
    write_method(tmp_path, "x", moving, E, K)
    rows = read_requests(tmp_path / method_file("requests", "x"))
    assert [row.server for row in rows] == [0, 1, 2, 0]
    assert all(0 < row.first_token_s < row.latency_s for row in rows)
    row = summary_row(moving, CONFIG.d_model)
    latency = [r.latency_s for r in rows]
    assert row["mean_latency_s"] == pytest.approx(np.mean(latency), abs=1e-6)
    assert row["latency_s_N"][1] == pytest.approx(latency[1], abs=1e-6)
    assert row["tokens_per_s"] > 0 and row["call_overhead_s"] > 0


def test_events_are_calls_and_blocks_on_the_clock_of_the_run(moving):
    events = events_of(moving)
    assert {"call", "transfer"} <= {event.kind for event in events}
    end_s = max(one.times_s[-1] for one in moving.asked) - moving.begun_s
    calls = [event for event in events if event.kind == "call"]
    assert all(-0.01 < event.t_s < end_s + 0.01 for event in calls)
    moved = [event for event in events if event.kind == "transfer"]
    assert len(moved) == moving.keeper.table.moved


def test_a_run_with_a_lost_server_and_a_lost_request_is_written(tmp_path):
    with LiveCluster([SLOTS] * 2) as cluster:
        asked = requests((9, 5), NEW, 2)
        asked[1].max_new_tokens = 5000
        run = cluster.run(random_held(2), asked, drill=Drill("kill", 1, 4))
    write_method(tmp_path, "x", run, E, K)
    text = (tmp_path / method_file("requests", "x")).read_text().splitlines()
    assert text[2].endswith(",,")
    row = summary_row(run, CONFIG.d_model)
    assert row["latency_s_N"][1] is None and row["mean_latency_s"] > 0
    (failure,) = [event for event in events_of(run) if event.kind == "fail"]
    assert failure.server == 1
    assert np.isnan(served_rows(run.asked)[1].latency_s)

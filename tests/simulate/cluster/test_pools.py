import dataclasses

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.simulate.cluster.calls import CallTable, GpuIndex, StepPlanner
from moe_edge.simulate.cluster.pools import RoutingPools, complete_tokens
from moe_edge.workload.requests import Request
from moe_edge.workload.routing_model import RoutingModel
from moe_edge.workload.traces import Trace
from tests.support.growth import times_longer
from tests.support.tiny_cluster import tiny_costs

IDS = np.array([[[0, 2], [1, 0]], [[1, 2], [2, 0]], [[2, 1], [0, 1]]])  # [T, L, K]


def test_cells_run_on_from_the_end_to_the_start():
    pools = RoutingPools({"a": IDS}, 3)
    assert pools.cells("a", 0, 1).tolist() == [[0, 2, 4, 3]]
    assert pools.cells("a", 2, 2).tolist() == [[2, 1, 3, 4], [0, 2, 4, 3]]
    assert pools.cells("a", 5, 1).tolist() == [[2, 1, 3, 4]]


def test_frequency_is_that_of_the_pool():
    frequency = RoutingPools({"a": IDS}, 3).frequency("a")
    np.testing.assert_allclose(frequency * 6, [[1, 2, 3], [3, 2, 1]] + 0 * frequency)


def test_requests_begin_at_rows_drawn_by_the_seed():
    pools = RoutingPools.sampled(
        RoutingModel.load("mixtral", num_layers=2), ["c4"], 0, 99
    )
    requests = [Request(i, 0, 0.0, 1, 1, "c4") for i in range(200)]
    rows = pools.rows(requests, 1)
    assert (rows == pools.rows(requests, 1)).all() and rows.max() < 99
    assert len(set(rows.tolist())) > 50


def test_recorded_routes_become_a_pool():
    flat = IDS.reshape(6, 2)
    trace = Trace(
        num_experts=3,
        top_k=2,
        request=np.zeros(6, np.int32),
        phase=np.array([0, 0, 1, 1, 1, 1], np.int32),
        step=np.repeat(np.arange(3, dtype=np.int32), 2),
        layer=np.tile(np.arange(2, dtype=np.int32), 3),
        ids_TK=flat.astype(np.int32),
        weights_TK=np.ones((6, 2), np.float32),
    )
    pools = RoutingPools.recorded(trace, ["mine"])
    assert pools.cells("mine", 1, 1).tolist() == [[1, 2, 5, 3]]


def test_a_step_that_lacks_a_layer_is_left_out():
    layer, step = np.array([0, 1, 0, 0, 0, 1, 1]), np.array([0, 0, 1, 2, 2, 2, 2])
    ids_TK = np.array([[0], [1], [9], [2], [3], [4], [5]], np.int32)
    trace = Trace(
        num_experts=10,
        top_k=1,
        request=np.zeros(7, np.int32),
        phase=np.ones(7, np.int32),
        step=step.astype(np.int32),
        layer=layer.astype(np.int32),
        ids_TK=ids_TK,
        weights_TK=np.ones((7, 1), np.float32),
    )
    assert complete_tokens(trace)[..., 0].tolist() == [[0, 1], [2, 4], [3, 5]]
    short = dataclasses.replace(trace, ids_TK=np.where(ids_TK == 5, -1, ids_TK))
    assert complete_tokens(short)[..., 0].tolist() == [[0, 1]]
    short = dataclasses.replace(trace, ids_TK=ids_TK * 0 - 1)
    with pytest.raises(ConfigError, match="no step of the route trace passed every"):
        RoutingPools.recorded(short, ["x"])


def test_bad_routing_is_refused():
    with pytest.raises(ConfigError, match="unknown routing domain 'b'; known: a"):
        RoutingPools({"a": IDS}, 3).frequency("b")


def test_calls_of_a_step_are_grouped_by_layer_and_gpu():
    costs = tiny_costs((1, 2))
    index = GpuIndex(costs)
    # Experts 0 on server 0; 1 and 2 on the two GPUs of server 1, in both layers.
    gpu_NLE = np.array([[[0, -1, -1]] * 2, [[-1, 0, 1]] * 2])
    table = CallTable(gpu_NLE, costs, index)
    assert table.target_NX.tolist() == [[0, 1, 2] * 2, [0, 1, 2] * 2]
    pools = RoutingPools({"a": IDS}, 3)
    cells = pools.cells("a", 0, 3)
    calls = StepPlanner(index, pools, costs).plan(0, table.target_NX[0], cells)
    assert calls.offset == [0, 3, 6]
    assert calls.gpu == [0, 1, 2, 0, 1, 2]
    assert calls.pairs == [1, 2, 3, 3, 2, 1]
    assert calls.seconds == [0.25] * 6
    assert (calls.local_pairs, calls.remote_pairs, calls.remote_blocks) == (4, 8, 4)
    one = StepPlanner(index, pools, costs).plan(1, table.target_NX[1], cells[:1])
    assert (one.offset, one.gpu, one.pairs) == ([0, 2, 4], [0, 2, 0, 1], [1, 1, 1, 1])
    assert (one.local_pairs, one.remote_pairs) == (2, 2)


def test_a_token_goes_once_to_a_gpu_that_has_several_of_its_blocks():
    costs = tiny_costs((1, 1))
    index = GpuIndex(costs)
    # Experts 1 and 2 on the same GPU: two tokens of layer 0 want both.
    gpu_NLE = np.array([[[0, -1, -1]] * 2, [[-1, 0, 0]] * 2])
    target_X = CallTable(gpu_NLE, costs, index).target_NX[0]
    pools = RoutingPools({"a": IDS}, 3)
    calls = StepPlanner(index, pools, costs).plan(0, target_X, pools.cells("a", 0, 3))
    assert (calls.gpu, calls.pairs) == ([0, 1, 0, 1], [1, 5, 3, 3])
    size = costs.block.token_bytes
    assert calls.there == calls.back == [size, 3 * size, 3 * size, 3 * size]


def test_times_of_large_and_small_batches_are_the_cost_model_s():
    costs = tiny_costs((1, 1))
    tokens = np.array([0, 1, 511, 512, 10**9])
    got = GpuIndex(costs).block_s(np.ones(5, int), tokens)
    np.testing.assert_array_equal(got, costs.compute_s(1, 0, tokens))


def test_tokens_planned_together_are_as_planned_one_by_one():
    costs = tiny_costs((1, 2, 1))
    index = GpuIndex(costs)
    gpu_NLE = np.array([[[0, -1, -1]] * 2, [[-1, 0, 1]] * 2, [[0, -1, 0]] * 2])
    target_X = CallTable(gpu_NLE, costs, index).target_NX[2]
    pools = RoutingPools({"a": IDS}, 3)
    cells = pools.cells("a", 0, 3)
    planner = StepPlanner(index, pools, costs)
    together = planner.plan_tokens(2, target_X, cells)
    for row, many in zip(cells, together, strict=True):
        one = planner.plan(2, target_X, row[None])
        part = slice(many.offset[0], many.offset[-1])
        assert [o - many.offset[0] for o in many.offset] == one.offset
        assert (many.gpu[part], many.pairs[part]) == (one.gpu, one.pairs)
        assert (many.there[part], many.back[part]) == (one.there, one.back)
        assert many.seconds[part] == one.seconds
        for name in ("local_pairs", "remote_pairs", "remote_blocks"):
            assert getattr(many, name) == getattr(one, name)


def test_time_of_complete_tokens_is_linear():
    def trace(steps):
        rows = np.arange(2 * steps, dtype=np.int32)
        ids_TK = np.stack([rows % 8, rows % 7], axis=1).astype(np.int32)
        numbers = np.zeros_like(rows), np.ones_like(rows), rows // 2, rows % 2
        return Trace(8, 2, *numbers, ids_TK, np.ones(ids_TK.shape, np.float32))

    # A look at all rows for each step: 100 times as long.
    assert times_longer(complete_tokens, trace(4_000), trace(40_000)) < 35

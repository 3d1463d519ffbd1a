"""What holds in every run, whatever the numbers."""

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError, MoeEdgeError, RequestError
from moe_edge.simulate.cluster.build import build_scenario, followed
from moe_edge.simulate.cluster.loop import ClusterLoop, LoopOptions
from moe_edge.simulate.cluster.report import ClusterResult
from moe_edge.simulate.cluster.scenario import METHODS
from tests.support.slow_cases import slow_but
from tests.support.tiny_cluster import asked, constant_pools, placed, run, tiny_costs

RUNS = [m for m in METHODS if m != "eplb"]
DEAR = {"latency", "moe_infinity"}  # a second each


def case(**kwargs):
    known = {
        "interval_s": 0.5,
        "requests_per_server": 5,
        "seed": 3,
        "correlated": False,
    }
    return build_scenario(**(known | kwargs))


@pytest.fixture(scope="module")
def crowded():
    """A case whose queues are never empty, on unequal machines."""
    tokens = {"input_tokens": 48, "output_tokens": 8}
    options = {"expert_memory_share": 0.6}
    return case(cluster="mixed", cluster_options=options, **tokens)


@pytest.mark.parametrize("method", slow_but(set(RUNS) - DEAR, RUNS))
def test_every_request_and_every_byte_is_accounted_for(crowded, method):
    loop = crowded.loop(method, LoopOptions(max_batch=2), period_s=2.0)
    loop.run()
    result, shape = ClusterResult(loop), crowded.shape
    tokens_N = np.zeros(3, np.int64)
    for request in crowded.requests:
        tokens_N[request.server] += request.input_tokens + request.output_tokens - 1
    pairs = tokens_N.sum() * shape.num_layers * shape.top_k
    assert (result.latency_R > 0).all() and (result.first_R <= result.latency_R).all()
    assert len(loop.heap) == 0 and not loop.schedule.open
    assert all(lane.idle for lane in loop.schedule.lanes)
    assert result.pairs == pairs == result.counts_NX.sum()
    calls = result.bytes_NN["call"]
    away = result.pairs - result.local_pairs
    states = calls.sum() / (2 * shape.block.token_bytes)
    # A token's pairs that go to one GPU share a state; here that happens.
    assert away / shape.top_k < states < away if away else states == 0
    assert states == int(states)
    np.testing.assert_array_equal(calls, calls.T)  # results are as large as messages
    assert (result.link_use <= 1).all() and (result.gpu_use_G <= 1).all()
    if method == "moe_infinity_lb":
        assert result.facts["redirected"] > 0
    else:
        by_layer = result.counts_NX.reshape(3, shape.num_layers, -1).sum(axis=2)
        np.testing.assert_array_equal(
            by_layer, tokens_N[:, None] * shape.top_k + 0 * by_layer
        )


def test_same_seed_same_run_and_another_seed_another_one(crowded):
    def latencies(seed):
        loop = crowded.loop("prism", seed=seed)
        loop.run()
        return ClusterResult(loop).latency_R

    np.testing.assert_array_equal(latencies(0), latencies(0))
    assert (latencies(0) != latencies(1)).any()


def test_planning_ahead_changes_nothing(crowded, monkeypatch):
    def latencies():
        loop = crowded.loop("greedy", LoopOptions(max_batch=2), period_s=2.0)
        loop.run()
        return ClusterResult(loop).latency_R

    ahead = latencies()
    monkeypatch.setattr("moe_edge.simulate.cluster.calls.AHEAD", 1)
    np.testing.assert_array_equal(latencies(), ahead)


def test_free_network_equal_gpus_and_one_at_a_time_make_placements_equal():
    # One block a layer and token: with more, GPUs that share a layer are faster.
    rng = np.random.default_rng(0)
    pools = constant_pools(3, a=[[0], [1], [2]], b=[[1], [2], [2]])
    rows = [(n % 3, 20.0 * n, 1, 3, "ab"[n % 2]) for n in range(6)]
    seen = set()
    for _ in range(5):
        gpu_NLE = np.where(rng.random((3, 3, 3)) < 0.5, 0, -1)
        gpu_NLE[0][(gpu_NLE < 0).all(axis=0)] = 0
        costs = tiny_costs((1, 1, 1), free_network=True)
        loop, _ = run(asked(*rows), placed(*gpu_NLE), costs, pools)
        seen.add(tuple(np.subtract(loop.finish_R, [row[1] for row in rows]).tolist()))
    assert seen == {(3 * 3 * 0.75,) * 6}


def test_more_bandwidth_never_hurts_a_lone_request():
    means = []
    for mbps in (100, 500, 1000):
        loop = case(
            requests_per_server=1, interval_s=50.0, cluster_options={"mbps": mbps}
        ).loop("uniform")
        loop.run()
        means.append(ClusterResult(loop).mean_latency_s)
    assert means == sorted(means, reverse=True) and means[0] > 2 * means[2]


def test_windows_add_up_to_the_local_ratio():
    built = case(requests_per_server=8)
    loop = built.loop("redundance", LoopOptions(window_s=1.0))
    loop.run()
    result = ClusterResult(loop)
    pairs = np.array(loop.windows)
    assert len(pairs) > 3 and pairs[..., 1].sum() == result.pairs
    assert result.local_ratio == pairs[..., 0].sum() / pairs[..., 1].sum()
    seen = result.ratio_W[~np.isnan(result.ratio_W)]
    assert ((seen >= 0) & (seen <= 1)).all()


def test_second_workload_follows_the_first_at_each_server():
    both = case(then_workload="multidata").requests
    for n in range(3):
        domains = [r.domain for r in both if r.server == n]
        assert domains == [domains[0]] * 5 + [domains[-1]] * 5
    assert [r.id for r in both] == list(range(30))
    assert followed([], both, 3) == both


def test_placers_can_be_told_other_statistics():
    told, other = case(placed_for="c4"), case()
    assert told.requests == other.requests
    shares = told.frequency_NLE.sum(axis=2)
    np.testing.assert_allclose(shares, other.frequency_NLE.sum(axis=2))
    alike = told.frequency_NLE / shares[..., None]
    np.testing.assert_allclose(alike[0], alike[2])
    with pytest.raises(ConfigError, match="workload or routing domain 'verse'"):
        case(placed_for="verse")


def test_requests_can_follow_a_recorded_route(request):
    name = "routing/trace_qwen3_30b_a3b.csv.gz"
    data_dir = request.config.rootpath.parent / "shared" / "data"
    if not (data_dir / name).exists():
        pytest.skip(f"no data folder: {data_dir} is not there")
    traced = {"routing_trace": name, "data_dir": str(data_dir), "correlated": True}
    built = case(model="qwen3_30b_a3b", cluster_options={"num_gpus": 8}, **traced)
    loop = built.loop("optimal")
    loop.run()
    assert ClusterResult(loop).counts_NX.reshape(-1, 48, 128).sum(axis=2).min() > 0
    other = traced | {"routing_trace": "routing/trace_gemma4_26b_a4b.csv.gz"}
    with pytest.raises(ConfigError, match=r"\(30, 128, 6\), .* has \(48, 128, 6\)"):
        case(model="qwen3_30b_a3b", cluster_options={"num_gpus": 8}, **other)


def test_what_cannot_run_is_refused():
    pools = constant_pools(2, a=[[0]])
    costs, here = tiny_costs((1,)), placed([[0, 0]])
    with pytest.raises(ConfigError, match=r"shape \(1, 2, 2\), .* ask for \(1, 1, 2\)"):
        run(asked((0, 0.0, 1, 1, "a")), placed([[0, 0], [0, 0]]), costs, pools)
    with pytest.raises(RequestError, match="for server 1, expected 0 to 0"):
        run(asked((1, 0.0, 1, 1, "a")), here, costs, pools)
    loop = ClusterLoop(asked((0, 0.0, 1, 1, "a")), here, costs, pools, LoopOptions(), 0)
    with pytest.raises(MoeEdgeError, match="1 requests are not finished"):
        ClusterResult(loop)
    with pytest.raises(ConfigError, match="max_batch must be a positive whole number"):
        LoopOptions(max_batch=0)
    with pytest.raises(ConfigError, match="unknown method 'best'; known: eplb, "):
        case().loop("best")
    with pytest.raises(ConfigError, match="then_workload would have no effect"):
        case(arrivals="azure_conv", interval_s=None, then_workload="multidata")
    with pytest.raises(ConfigError, match="give both input_tokens and output_tokens"):
        case(input_tokens=4)
    with pytest.raises(ConfigError, match="4 domains for 3 servers"):
        case(workload="c4,c4,c4,c4")

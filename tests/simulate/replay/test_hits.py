import numpy as np
import pytest

from moe_edge.simulate.replay.hits import replay
from moe_edge.simulate.replay.lookups import equal_slots, known_policies, policy_of
from moe_edge.workload.trace_reader import read_trace
from tests.support.traces import ROUTING, make_trace, one_layer

# interfaces.md: decode after prefill warm-up, 13, 32 and 64 slots a layer.
SLOTS = (13, 32, 64)
PUBLIC = {
    "qwen3_30b_a3b": {
        "lru": (0.546, 0.817, 0.958),
        "lfu": (0.580, 0.821, 0.958),
        "belady": (0.698, 0.912, 0.969),
    },
    "gemma4_26b_a4b": {
        "lru": (0.545, 0.795, 0.951),
        "lfu": (0.590, 0.815, 0.952),
        "belady": (0.696, 0.900, 0.963),
    },
}
# Two slots hold 0 and 1 after the prefill. By hand, hits marked *:
#   lru     0* 2/1 0* 1/2 2/0 1*    lfu  0* 2/1 0* 1/2 2/1 1/2
#   belady  0* 2/1 0* 1/0 2* 1*     (x/y: x is loaded, y goes)
HAND = one_layer([0, 1], [0, 2, 0, 1, 2, 1])


def run(trace, name, slots):
    return replay(trace, policy_of(name, trace), equal_slots(trace, slots))


@pytest.mark.parametrize(
    "name, hits", [("lru", 3), ("lfu", 2), ("belady", 4), ("on_demand", 0)]
)
def test_replay_by_hand_golden(name, hits):
    result = run(HAND, name, 2)
    assert (result.hits_L.tolist(), result.misses_L.tolist()) == ([hits], [6 - hits])
    assert result.hit_ratio == hits / 6
    assert (result.prefill_hits, result.prefill_misses) == (0, 2)


def test_replay_counts_an_expert_of_two_tokens_once():
    trace = make_trace([(1, 0, 0, [0, 1]), (1, 0, 0, [1, 2]), (1, 1, 0, [1, 0])])
    result = run(trace, "lru", 3)
    assert (int(result.hits_L[0]), int(result.misses_L[0])) == (2, 3)


def test_replay_more_chosen_than_slots_passes_in_waves():
    trace = make_trace([(1, 0, 0, [0, 1, 2]), (1, 1, 0, [2, 1, 3])])
    result = run(trace, "lru", 2)
    # The third expert took the place of one of the first two.
    assert (int(result.hits_L[0]), int(result.misses_L[0])) == (2, 4)


def test_replay_in_waves_counts_what_travels_again():
    # 2 and 3 are there. The run 0, 1 throws both out, so 3 travels though it was there.
    trace = make_trace(
        [(1, 0, 0, [2, 3]), (1, 1, 0, [0, 1]), (1, 1, 0, [3, 0])], num_experts=6
    )
    result = run(trace, "lru", 2)
    assert (int(result.hits_L[0]), int(result.misses_L[0])) == (0, 2 + 3)


def test_replay_is_nan_for_layers_without_lookups():
    trace = make_trace([(1, 0, 1, [0]), (1, 1, 1, [0])])
    result = run(trace, "lru", 2)
    assert np.isnan(result.hit_ratio_L[0]) and result.hit_ratio_L[1] == 0.5


def test_replay_bounds_hold_on_a_random_trace():
    rng = np.random.default_rng(0)
    chances = rng.dirichlet(np.full(16, 0.3), 3)
    rows = [
        (int(step >= 10), step, layer, rng.choice(16, 3, False, chances[layer]))
        for step in range(80)
        for layer in range(3)
    ]
    trace = make_trace(rows, num_experts=16)
    names = [n for n in known_policies(trace) if n != "adapmoe_dp"]
    ratios = {name: run(trace, name, 5).hit_ratio for name in names}
    assert max(ratios, key=ratios.get) == "belady"
    assert min(ratios, key=ratios.get) == "on_demand"
    assert ratios["static_oracle"] > ratios["static_prompt"]
    everything = [run(trace, name, 16) for name in names if name != "on_demand"]
    assert len({int(result.misses_L.sum()) for result in everything}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    ["qwen3_30b_a3b", pytest.param("gemma4_26b_a4b", marks=pytest.mark.slow)],
)
def test_replay_public_traces_golden(model):
    path = ROUTING / f"trace_{model}.csv.gz"
    if not path.is_file():
        pytest.skip(f"needs {path} (MOE_EDGE_SHARED names the shared folder)")
    trace = read_trace(path, 128)
    for name, expected in PUBLIC[model].items():
        got = [run(trace, name, slots).hit_ratio for slots in SLOTS]
        assert np.abs(np.subtract(got, expected)).max() < 0.005, (name, got)

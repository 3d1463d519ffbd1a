"""CPU assist: plans against brute force, arithmetic against the device's."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.kernels import native
from moe_edge.model.experts import run_experts
from moe_edge.model.record import RecordLayout
from moe_edge.offload.assist import (
    HostExperts,
    MeasuredCost,
    host_array,
)
from moe_edge.offload.assist_rules import plan_fiddler, plan_two_front, plan_two_pointer
from tests.support.tiny_models import ALL, BF16, RandomReader


def test_plan_two_pointer_golden():
    # Load 2, CPU 3: a -> link (2, 0), e -> CPU (2, 3), b (4, 3), d (4, 6), c (6, 6).
    assert plan_two_pointer("abcde", 2.0, 3.0) == (["a", "b", "c"], ["e", "d"])


@pytest.mark.parametrize("load_s, cpu_s", [(1.0, 1e9), (1e9, 1.0)])
def test_plan_two_pointer_none_and_one(load_s, cpu_s):
    assert plan_two_pointer([], load_s, cpu_s) == ([], [])
    assert plan_two_pointer([7], load_s, cpu_s) == ([7], [])


def test_plan_two_pointer_holds_its_bound():
    rates = (0.1, 0.5, 1.0, 1.7, 4.0)
    for n, load_s, cpu_s in itertools.product(range(1, 9), rates, rates):
        to_load, to_cpu = plan_two_pointer(range(n), load_s, cpu_s)
        assert to_load + to_cpu[::-1] == list(range(n)), "best ones travel"
        sides_s = len(to_load) * load_s, len(to_cpu) * cpu_s
        best_s = min(max(i * load_s, (n - i) * cpu_s) for i in range(n + 1))
        cost_s = (load_s, cpu_s)[int(np.argmax(sides_s))]
        assert best_s - 1e-9 <= max(sides_s) < best_s + cost_s + 1e-9


def test_plan_two_pointer_shares_by_speed():
    to_load, to_cpu = plan_two_pointer(range(300), 1.0, 2.0)
    assert (len(to_load), len(to_cpu)) == (200, 100)


def test_plan_two_front_golden():
    # Busiest first: b 3, d 2, then a, c, e. Load 2, CPU 3: done at (2, 3): b travels;
    # (4, 3): e on the CPU; (4, 6): d; (6, 6): a; (8, 6): c on the CPU.
    to_load, to_cpu = plan_two_front("abcde", [1, 3, 1, 2, 1], 2.0, 3.0)
    assert (to_load, to_cpu) == (["b", "d", "a"], ["e", "c"])


@pytest.mark.parametrize("load_s, cpu_s", [(1.0, 1.7), (0.3, 1.0), (1.0, 0.1)])
def test_plan_two_front_is_the_best_split(load_s, cpu_s):
    for n in range(9):
        to_load, to_cpu = plan_two_front(range(n), [1] * n, load_s, cpu_s)
        assert sorted(to_load + to_cpu) == list(range(n))
        longest_s = max(len(to_load) * load_s, len(to_cpu) * cpu_s)
        best_s = min(max(i * load_s, (n - i) * cpu_s) for i in range(n + 1))
        assert longest_s == pytest.approx(best_s)


def test_plan_fiddler_golden():
    on_cpu = plan_fiddler(np.array([1, 2, 3, 4]), 1.0, copy_s=2.5, gpu_s=0.5)
    assert on_cpu.tolist() == [True, True, False, False]
    assert plan_fiddler(np.array([], np.int32), 1.0, 1.0, 1.0).shape == (0,)


def test_measured_cost_is_the_mean_of_the_last():
    cost = MeasuredCost(3, start_s=9.0)
    assert cost.mean_s == 9.0
    means = []
    for seconds in (1.0, 2.0, 6.0, 10.0):
        cost.add(seconds)
        means.append(cost.mean_s)
    assert means == [1.0, 1.5, 3.0, 6.0]


@pytest.mark.parametrize("start_s", [0.0, -1.0, float("nan"), float("inf")])
def test_measured_cost_rejects_start(start_s):
    with pytest.raises(ConfigError, match=f"start value of a cost is {start_s} s"):
        MeasuredCost(3, start_s)


def test_measured_cost_rejects_window():
    with pytest.raises(ConfigError, match="measurements of a cost must be .* got 0"):
        MeasuredCost(0, 1.0)


def layer_of(name, dtype, tokens):
    """Records, inputs and routing of a layer, and the device's way to run it."""
    config = ALL[name]
    moe, rng = config.moe, np.random.default_rng(1)
    E, K, D = moe.num_experts, moe.top_k, config.d_model
    records_ER = RandomReader(config, dtype=dtype).experts(1)
    x_TD = rng.standard_normal((tokens, D), np.float32)
    ids_TK = np.stack([rng.choice(E, K, replace=False) for _ in range(tokens)])
    ids_TK = ids_TK.astype(np.int32)
    ids_TK[-1] = E  # padding
    weights_TK = rng.random((tokens, K), np.float32)
    options = {"activation": moe.activation, "swiglu_limit": moe.swiglu_limit}
    layout = RecordLayout.of(config)
    run = jax.jit(functools.partial(run_experts, layout=layout, **options))
    return records_ER, x_TD, ids_TK, weights_TK, config, run


def assert_close(ours, reference):
    """Gate B."""
    reference = np.asarray(reference)
    error = np.abs(np.asarray(ours) - reference).max() / reference.std()
    assert error <= 1e-5


@pytest.mark.parametrize(
    "name, dtype, tokens",
    [("gqa", np.float32, 3), ("gqa", BF16, 40), ("gpt_oss", np.float32, 40)],
)
def test_host_and_device_parts_sum_to_the_layer(name, dtype, tokens):
    records_ER, x_TD, ids_TK, weights_TK, config, run = layer_of(name, dtype, tokens)
    E = len(records_ER)
    on_host = sorted(set(ids_TK.ravel()) - {E})[1::2]
    is_host_TK = np.isin(ids_TK, on_host)
    assert is_host_TK.any() and (~is_host_TK & (ids_TK < E)).any()
    stored = jnp.array(records_ER.view(np.uint16) if dtype == BF16 else records_ER)
    x, weights = jnp.array(x_TD), jnp.array(weights_TK)
    host = HostExperts(config, list(records_ER))
    assert (host._kernel is not None) == (native.choice() == "native")
    host_TD = host.outputs(on_host, x, ids_TK, weights_TK)
    host_only = jnp.array(np.where(is_host_TK, ids_TK, E))
    assert_close(host_TD, run(x, host_only, weights, stored))
    device_only = jnp.array(np.where(is_host_TK, E, ids_TK))
    device_TD = run(x, device_only, weights, stored)
    whole_TD = run(x, jnp.array(ids_TK), weights, stored)
    assert_close(host_TD + device_TD, whole_TD)
    assert (host_TD[-1] == 0).all(), "padding"


def test_host_outputs_of_one_expert_match_numpy():
    records_ER, x_TD, _, _, config, _ = layer_of("gqa", np.float32, 5)
    layout = RecordLayout.of(config)
    gate, up, down = (layout.part(records_ER[4], p) for p in ("gate", "up", "down"))
    pre_TF = x_TD.astype(np.float64) @ gate.T
    expected_TD = (pre_TF / (1 + np.exp(-pre_TF)) * (x_TD @ up.T)) @ down.T
    ids_TK, weights_TK = np.full((5, 1), 4, np.int32), np.ones((5, 1), np.float32)
    host = HostExperts(config, list(records_ER))
    assert_close(host.outputs([4], x_TD, ids_TK, weights_TK), expected_TD)


def test_host_outputs_without_experts_is_zero():
    records_ER, *_, config, _ = layer_of("gqa", np.float32, 2)
    x_TD = np.ones((2, config.d_model), np.float32)
    ids_TK, weights_TK = np.zeros((2, 3), np.int32), np.ones((2, 3), np.float32)
    host = HostExperts(config, list(records_ER))
    y_TD = host.outputs([], x_TD, ids_TK, weights_TK)
    np.testing.assert_array_equal(y_TD, np.zeros_like(x_TD))


def test_host_outputs_input_on_another_device_is_moved():
    records_ER, x_TD, ids_TK, weights_TK, config, _ = layer_of("gqa", np.float32, 2)
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    elsewhere = jax.device_put(x_TD, jax.devices()[1])
    ids = [int(ids_TK[0, 0])]
    host = HostExperts(config, list(records_ER))
    here_TD = host.outputs(ids, x_TD, ids_TK, weights_TK)
    there_TD = host.outputs(ids, elsewhere, ids_TK, weights_TK)
    np.testing.assert_array_equal(here_TD, there_TD)


def test_host_array_of_bfloat16_is_its_bits():
    array = np.arange(64, dtype=np.float32).astype(BF16)
    put = host_array(array)
    assert put.dtype == jnp.uint16
    np.testing.assert_array_equal(np.asarray(put), array.view(np.uint16))

"""Experts that the host computes: the same sums by another order (gate B)."""

import re
import time

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine import backends
from moe_edge.engine.backends import HostBackend
from moe_edge.engine.generate import generate_rows
from moe_edge.engine.routing_reader import Reading
from moe_edge.model.sampling import Sampling
from moe_edge.offload import link
from moe_edge.offload.assist_base import ASSISTS, Assist, get_assist
from moe_edge.offload.link import TransferLink
from moe_edge.offload.store import HostStore
from tests.offload.test_caller_carrier import Clock
from tests.support.layered import (
    CAPACITY,
    NINE,
    STEPS,
    THREE,
    StoreReader,
    forced_logits,
    layered,
    resident_logits,
)
from tests.support.prefetches import note_prefetches
from tests.support.slow_cases import slow
from tests.support.tiny_models import ALL, BF16, GQA, random_prompts

SLOW = {"link_bytes_per_s": 2e6}  # 2 to 4 ms a block: the host is quicker


class KnownCost:
    """Costs that do not depend on how busy the machine is."""

    def __init__(self, mean_s):
        self.mean_s = mean_s

    def add(self, seconds):
        assert seconds > 0


def know_costs(engine) -> None:
    """Of an expert: twice as quick on the host as over the link."""
    (host,) = engine.backends
    host.load, host.host = KnownCost(2e-3), KnownCost(1e-3)


def assert_gate_b(logits, expected):
    difference = np.abs(logits - expected).max()
    assert difference <= 1e-5 * expected.std()
    second, first = np.sort(expected, axis=-1)[..., -2:].transpose(2, 0, 1)
    decided = first - second > 10 * difference
    assert decided.mean() > 0.95
    same = logits.argmax(-1) == expected.argmax(-1)
    assert same[decided].all()


@pytest.mark.parametrize("rule", [*ASSISTS])
@pytest.mark.parametrize(
    "name, dtype, lengths, slots",
    [
        *slow(("gqa", BF16, NINE, 9), ("gqa", np.float32, THREE, 6)),
        ("gpt_oss", BF16, NINE, 4),
    ],
)
def test_assisted_equals_resident_by_gate_b(name, dtype, lengths, slots, rule):
    plan = "equal" if slots == 4 else "one_pool"
    engine = layered(name, dtype, slots, slot_plan=plan, assist=rule, **SLOW)
    prompts = random_prompts(ALL[name], lengths)
    know_costs(engine)
    logits = forced_logits(engine, prompts)
    assert_gate_b(logits, resident_logits(name, dtype, lengths))
    assert engine.backends[0].computed > 8 or slots == 4


@pytest.mark.parametrize("horizon", [1, 3])
def test_assisted_with_prefetching_equals_resident(horizon):
    # Three layers: with horizon 3 a layer's own next choice is fetched ahead too.
    engine = layered(
        "gqa",
        BF16,
        assist="two_pointer",
        predictor="previous",
        horizon=horizon,
        **SLOW,
    )
    know_costs(engine)
    asked = note_prefetches(engine.queue)
    for _ in range(2):
        logits = forced_logits(engine, random_prompts(GQA, NINE))
        assert_gate_b(logits, resident_logits("gqa", BF16, NINE))
    assert engine.backends[0].computed > 8
    assert sum(asked) > 8  # how many travel in time depends on the clock


def test_assisted_prefill_is_exact_and_the_host_idle():
    engine = layered("gqa", BF16, assist="two_pointer")
    logits = forced_logits(engine, random_prompts(GQA, NINE), 1)[0]
    np.testing.assert_array_equal(logits, resident_logits("gqa", BF16, NINE)[0])


def test_what_the_host_computes_is_not_moved():
    plain, assisted = (
        layered("gqa", BF16, assist=assist, **SLOW) for assist in (None, "two_pointer")
    )
    know_costs(assisted)
    for engine in (plain, assisted):
        forced_logits(engine, random_prompts(GQA, NINE))
    counters, stats = assisted.layer_step.counters, assisted.queue.stats()
    misses = counters[True].misses + counters[False].misses
    assert stats.demand.count == misses - assisted.backends[0].computed
    assert stats.demand.bytes < plain.queue.stats().demand.bytes


def test_what_the_host_computed_in_the_warm_up_is_not_counted():
    engine = layered("gqa", BF16, assist="two_pointer", with_trace=False, **SLOW)
    know_costs(engine)
    generate_rows(engine, random_prompts(GQA, NINE), CAPACITY - NINE[0], Sampling())
    report = engine.report()
    misses = report["decode"]["misses"] + report["prefill"]["misses"]
    fetched = report["transfers"]["demand"]["count"]
    assert report["host_computed"] == misses - fetched > 0
    engine.close()


def test_nothing_is_compiled_while_an_assisted_sequence_grows():
    engine = layered("gqa", BF16, assist="two_pointer", **SLOW)
    forced_logits(engine, random_prompts(GQA, NINE), STEPS)
    compiled = engine.num_compiled()
    forced_logits(engine, random_prompts(GQA, NINE), STEPS)
    assert engine.num_compiled() == compiled


@pytest.mark.parametrize(
    "rule, load_s, host_s, expected",
    [
        ("two_pointer", 1.0, 1.0, [7, 1]),
        ("two_pointer", 4.0, 1.0, [7, 1, 3]),
        ("two_pointer", 1.0, 9.0, [7]),
        ("two_front", 4.0, 1.0, [7, 1, 5]),
        ("two_front", 1.0, 1.0, [7, 1]),
        ("two_front", 1.0, 9.0, []),
        ("fiddler", 2.0, 1.0, [5, 3, 1, 7]),
        ("fiddler", 1.0, 2.0, []),
        ("all", 1.0, 2.0, [5, 3, 1, 7]),
    ],
)
def test_split_by_measured_costs(rule, load_s, host_s, expected):
    assist = HostBackend(
        GQA, HostStore(StoreReader(GQA)), TransferLink(), get_assist(rule)
    )
    assist.load.add(load_s)
    assist.host.add(host_s)
    assert assist.take(reading_of([[5, 3], [3, 1], [7, 9]]), [5, 3, 1, 7]) == expected


def reading_of(ids_TK) -> Reading:
    ids_TK = np.array(ids_TK, np.int32)
    weights_TK = np.ones(ids_TK.shape, np.float32)
    shape_BS = (len(ids_TK), 1)
    given = ids_TK, weights_TK, weights_TK, None, None, None
    return Reading(GQA.moe_layers[0], 0, [0], shape_BS, *given)


def test_an_emulated_host_takes_its_time_and_computes_the_same():
    store, expert_s = HostStore(StoreReader(GQA)), 0.02
    hosts = [
        HostBackend(GQA, store, TransferLink(), get_assist("all"), seconds)
        for seconds in (None, expert_s)
    ]
    hidden_TD = np.ones((1, GQA.d_model), np.float32)
    reading, outputs = reading_of([[5, 3]]), []
    for host in hosts:
        for _ in range(2):  # the first compiles
            host.reset()
            started = time.perf_counter()
            outputs.append(host.start(hidden_TD, reading, [5, 3])())
            took_s = time.perf_counter() - started
    assert took_s >= 2 * expert_s <= hosts[1].busy_s
    assert hosts[1].host.mean_s >= expert_s and hosts[1].computed == 2
    assert all((y_TD == outputs[0]).all() for y_TD in outputs)


@pytest.mark.parametrize("meanwhile_s, left_s", [(0.0, 0.1), (0.04, 0.06), (0.11, 0.0)])
def test_an_emulated_host_begins_when_it_is_asked(meanwhile_s, left_s, monkeypatch):
    clock = Clock()
    for module in (backends, link):
        monkeypatch.setattr(module, "time", clock)
    store, reading = HostStore(StoreReader(GQA)), reading_of([[5, 3]])
    hidden_TD = np.ones((1, GQA.d_model), np.float32)
    host = HostBackend(GQA, store, TransferLink(), get_assist("all"), 0.05)
    finish = host.start(hidden_TD, reading, [5, 3])
    clock.now_s += meanwhile_s  # others work
    started_s = clock.now_s
    finish()
    assert clock.now_s - started_s == pytest.approx(left_s, abs=1e-4)
    # What others did meanwhile is none of its costs.
    assert (host.busy_s, host.host.mean_s) == pytest.approx((0.1, 0.05))


def test_fiddler_counts_the_devices_own_time_where_the_host_is_emulated():
    load_s = 1e-3
    given = (
        GQA,
        HostStore(StoreReader(GQA)),
        TransferLink(),
        get_assist("fiddler"),
        load_s,
    )
    host = HostBackend(*given)
    host.load = KnownCost(load_s)
    assert host.take(reading_of([[5, 3]]), [5, 3]) == [5, 3]  # a tie but for that


def test_unknown_assist_lists_the_known():
    with pytest.raises(
        ConfigError, match="'psychic'; known: all, fiddler, two_front, two_pointer"
    ):
        get_assist("psychic")


class Grasping(Assist):
    def __init__(self, taken):
        self.taken = taken

    def take(self, absent, ids_TK, costs):
        return self.taken


@pytest.mark.parametrize("taken", [[9], [5, 5]])
def test_assist_that_takes_what_is_not_absent_is_refused_by_name(taken):
    host = HostBackend(
        GQA, HostStore(StoreReader(GQA)), TransferLink(), Grasping(taken)
    )
    said = re.escape(f"assist Grasping took experts {taken} of layer ")
    with pytest.raises(ConfigError, match=rf"{said}\d+, expected each at most once"):
        host.take(reading_of([[5, 3]]), [5, 3])


@pytest.mark.parametrize("taken", [None, [5.0], np.array([5.0]), [True], 5, ["5"]])
def test_assist_that_gives_no_list_of_ids_is_refused_by_name(taken):
    host = HostBackend(
        GQA, HostStore(StoreReader(GQA)), TransferLink(), Grasping(taken)
    )
    said = re.escape(f"assist Grasping: take gave {taken!r}, expected a list of expert")
    with pytest.raises(ConfigError, match=said):
        host.take(reading_of([[5, 3]]), [5, 3])
    host.assist = Grasping(np.array([3]))
    assert host.take(reading_of([[5, 3]]), [5, 3]) == [3]

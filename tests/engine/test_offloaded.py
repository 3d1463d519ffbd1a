"""Offloaded engines from options: lossless settings, stores, and bad input."""

import dataclasses

import jax
import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.engine import offloaded, run_context
from moe_edge.engine.fused import FusedEngine
from moe_edge.engine.generate import generate
from moe_edge.engine.layer_programs import LayerPrograms
from moe_edge.engine.layered import LayeredEngine
from moe_edge.engine.load import load_engine
from moe_edge.engine.offload_options import OffloadOptions, resolve_offload
from moe_edge.engine.offloaded import check_offload, make_offloaded
from moe_edge.model import kv_cache
from moe_edge.offload.real_carrier import CallerCarrier
from moe_edge.offload.store import HostStore
from moe_edge.offload.thread_carrier import ThreadCarrier
from tests.support.conversion import convert
from tests.support.layered import (
    NINE,
    STEPS,
    StoreReader,
    assert_same_bits,
    forced_logits,
    layered,
    resident_logits,
)
from tests.support.slot_kinds import on_cpu
from tests.support.tiny_checkpoint import write_tiny_checkpoint
from tests.support.tiny_models import ALL, BF16, GQA, random_prompts

BITS = ("gqa", BF16, NINE)


@pytest.mark.parametrize(
    "route, options", [("substitute", {"a": 0.0}), ("drop", {"threshold": 0.0})]
)
@pytest.mark.parametrize("eviction", ["lru", "smoe_score"])
def test_lossy_route_at_zero_is_off_bit_for_bit(route, options, eviction):
    engine = layered(*BITS[:2], eviction=eviction, route=route, route_options=options)
    assert engine.lossless
    assert_same_bits(engine, *BITS)


@pytest.mark.parametrize(
    "route, options", [("substitute", {"a": 0.5}), ("drop", {"threshold": 0.4})]
)
def test_lossy_route_spares_transfers_and_says_that_it_is_lossy(route, options):
    engine = layered(*BITS[:2], 5, route=route, route_options=options)
    plain = layered(*BITS[:2], 5)
    logits = forced_logits(engine, random_prompts(GQA, NINE))
    forced_logits(plain, random_prompts(GQA, NINE))
    assert plain.lossless and not engine.lossless
    expected = resident_logits(*BITS)
    np.testing.assert_array_equal(logits[0], expected[0])  # a prompt is exact
    assert np.isfinite(logits).all() and not np.array_equal(logits, expected)
    ours, theirs = (each.layer_step.counters[True].misses for each in (engine, plain))
    assert ours < 0.8 * theirs


def test_operating_points_count_rerouted_choices_together():
    options = {"route": "substitute", "route_options": {"a": 0.5}}
    with layered(*BITS[:2], with_trace=False, **options) as engine:
        point, prompts = engine.at_k(2), random_prompts(GQA, NINE)
        forced_logits(engine, prompts, 2)
        forced_logits(point, prompts, 3)
        report = point.report()
        assert report["choices"] == 2 * (2 * 3 + 3 * 2)  # 2 MoE layers
        assert report["rerouted"] > 0 and engine.report() == report
        engine.reset_records()
        assert point.report()["choices"] == point.report()["rerouted"] == 0


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A Hugging Face folder and the same in our format."""
    folder = tmp_path_factory.mktemp("offloaded")
    hf = write_tiny_checkpoint(folder / "hf")
    convert(hf, folder / "ours", dtype="bfloat16")
    return hf, folder / "ours"


def tokens_of(loaded):
    result = generate(loaded.engine, [[5, 9, 200, 31], [7, 8]], 24)
    loaded.engine.close()
    return result.tokens


def test_mapped_store_equals_host_store_and_resident(checkpoints):
    tokens = [
        tokens_of(load_engine(checkpoints[1], with_tokenizer=False, offload=offload))
        for offload in (
            None,
            OffloadOptions(device_memory="25%", memory="host"),
            OffloadOptions(device_memory="25%", memory="mmap"),
        )
    ]
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.slow
def test_default_model_is_bit_equal_in_a_fiftieth_of_its_experts():
    prompts = [[17, 301, 44, 8, 256, 99], [3, 1]]
    logits = []
    for offload in (None, OffloadOptions(device_memory="2%")):
        engine = load_engine("default", with_tokenizer=False, offload=offload).engine
        logits.append(forced_logits(engine, prompts, 6))
        engine.close()
    np.testing.assert_array_equal(*logits)


# Budgets.


def test_share_counts_expert_bytes_only():
    options = OffloadOptions(device_memory="25%")
    engine = make_offloaded(StoreReader(GQA), options)
    assert engine.cache.spec.layer_S == (1, 1, 1, 2, 2, 2)
    assert engine.queue.slots.array.shape == (6, 1920)
    engine.close()


def test_amount_holds_slots_weights_and_cache():
    reader, capacity = StoreReader(GQA), 256
    cache = kv_cache.empty_cache(GQA.attention, 2, capacity)
    other = 3 * sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    share = make_offloaded(reader, OffloadOptions(device_memory="25%"))
    other += share.weights.num_bytes
    budget = OffloadOptions(device_memory=f"{other + 7 * 7680 - 1}B")
    engine = make_offloaded(reader, budget, batch=2, capacity=capacity)
    assert engine.cache.spec.num_slots == 6
    least = OffloadOptions(device_memory=f"{other + 2 * 7680 - 1}B")
    with pytest.raises(CapacityError, match=f"minimum is 2 slots.*{other + 2 * 7680} "):
        make_offloaded(reader, least, batch=2, capacity=capacity)
    for each in (share, engine):
        each.close()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"device_memory": "5%"}, r"holds 1 slots .* minimum is 2 .* 8.334% of the"),
        ({"device_memory": "9000GiB"}, r"9663676416000 bytes, the machine has \d+"),
        (
            {"device_memory": "15%", "slot_plan": "equal"},
            "holds 3 slots .* minimum is 4 slots .*one_pool: 2.* 16.67% of the",
        ),
        (
            {
                "device_memory": "40%",
                "slot_plan": "planned",
                "slot_plan_options": {"slots": [7, 3]},
            },
            "holds 9 slots .* minimum is 10 slots .* that is 41.67% of the",
        ),
    ],
)
def test_budget_that_does_not_fit_is_refused_before_loading(change, message):
    reader = StoreReader(GQA)
    reader.top = reader.experts = None  # not to be read
    for check in (check_offload, make_offloaded):
        with pytest.raises(CapacityError, match=message):
            check(reader, OffloadOptions(**change))


def test_dense_model_is_refused():
    dense = dataclasses.replace(GQA, dense_layers=(0, 1, 2))
    with pytest.raises(ConfigError, match="dense model: no experts to offload"):
        check_offload(StoreReader(dense), OffloadOptions())


def test_budget_above_the_machine_counts_what_it_has(monkeypatch):
    monkeypatch.setattr(offloaded, "device_memory_bytes", lambda: 10_000)
    with pytest.raises(CapacityError, match="the machine has 10000; ask for less"):
        check_offload(StoreReader(GQA), OffloadOptions(device_memory="50%"))


# Options.


@pytest.mark.parametrize(
    "change, message",
    [
        ({"eviction": "magic"}, "eviction policy 'magic'; known: .*lfu, lru"),
        ({"eviction_options": {"size": 3}}, "lru has no option 'size'"),
        ({"eviction": "belady"}, "belady .*future"),
        ({"eviction": "static_oracle"}, "static_oracle needs a profile"),
        (
            {"eviction": "static_oracle", "eviction_options": {"profile": 3}},
            "static_oracle: profile is 3, expected",
        ),
        (
            {"route": "magic"},
            "route policy 'magic'; known: drop, prefer",
        ),
        (
            {"route": "substitute", "route_options": {"a": 1.0}},
            r"a must lie in \[0, 1\)",
        ),
        ({"route": "substitute", "route_options": {"a": -0.1}}, r"got -0.1"),
        ({"route": "drop", "route_options": {"threshold": 1.0}}, r"\[0, 1\), got 1.0"),
        ({"mode": "magic"}, "offload mode 'magic'; known: auto, fused, layered"),
        (
            {"assist": "magic"},
            "CPU assist 'magic'; known: all, fiddler, two_front, two_pointer",
        ),
        ({"horizon": 0}, "horizon must be .* got 0"),
        ({"prefetch_limit": 0}, "prefetch_limit must be .* got 0"),
        ({"link_bytes_per_s": 0.0}, "link rate must be a positive .* got 0.0"),
        ({"link_bytes_per_s": -1e9}, "got -1000000000.0"),
        ({"link_bytes_per_s": 1e9, "link_latency_s": -1.0}, "latency .* got -1.0"),
        ({"link_latency_s": 1e-4}, "0.0001 and link_bytes_per_s not given"),
        ({"slot_plan": "magic"}, "slot plan 'magic'; known: .*equal, one_pool"),
        ({"slot_plan": "adapmoe_dp"}, "adapmoe_dp needs a profile; set profile_"),
        ({"device_memory": "lots"}, "'lots' is no budget"),
        ({"device_memory": "0%"}, "above 0 % to 100 %"),
        ({"device_memory": "101%"}, "above 0 % to 100 %"),
        (
            {"eviction": "on_demand", "predictor": "previous"},
            "keeps nothing, so predictor previous has nowhere",
        ),
        ({"mode": "fused", "predictor": "previous"}, "mode fused has no predictor"),
        ({"mode": "fused", "assist": "fiddler"}, "mode fused has no assist"),
        ({"mode": "fused", "link_bytes_per_s": 1e9}, "fused has no link_bytes_per_s"),
        ({"assist_expert_s": 0.1}, "assist_expert_s is 0.1 and assist not given"),
        ({"assist_options": {"x": 1}}, "assist_options x given and no assist; name on"),
        (
            {"assist": "all", "assist_options": {"x": 1}},
            "CPU assist all has no option 'x'; known: none",
        ),
        (
            {"assist": "all", "assist_expert_s": 0.0},
            "assist_expert_s must be positive, got 0.0",
        ),
        ({"mode": "fused", "memory": "mmap"}, "mode fused has no memory"),
        ({"mode": "fused", "layer_io": "packed"}, "mode fused has no layer_io"),
        (
            {"layer_io": "pinned"},
            "unknown layer_io 'pinned'; known: arrays, direct, packed",
        ),
        ({"layer_io": "direct"}, "memory pinned over the real link, got memory host;"),
        (
            {"layer_io": "direct", "memory": "pinned", "link_bytes_per_s": 1e9},
            "over the real link, got an emulated link; .* layer_io packed",
        ),
        (
            {"predictor": "oracle"},
            "predictor oracle knows .*replay --predictors ora",
        ),
        (
            {"predictor": "probe"},
            "predictor probe got no profile; give it in predictor",
        ),
    ],
)
def test_options_that_no_model_could_run_with_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        OffloadOptions(**change)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"predictor": "magic"}, "predictor 'magic'; known: .*none, .*previous"),
        ({"predictor_options": {"top": 1}, "predictor": "previous"}, "option .*'top'"),
        (
            {"predictor": "stale_gate", "horizon": 2},
            "horizon 2 exceeds .* n_layer_gate",
        ),
        ({"slot_plan": "planned"}, "slot plan planned got no slots; give it in slot_"),
        (
            {"slot_plan": "planned", "slot_plan_options": {"slots": [1000, 2]}},
            r"gives \[1000, 2\]; expected 2 numbers, one a MoE layer, none above 12",
        ),
        (
            {"slot_plan": "planned", "slot_plan_options": {"slots": "many"}},
            "slots of plan planned is 'many', expected a list",
        ),
        (
            {"slot_plan": "one_pool", "slot_plan_options": {"slots": [2, 2]}},
            "option of slot plan one_pool 'slots'",
        ),
        ({"memory": "tape"}, "expert memory 'tape'; known: host, mmap, pinned"),
        (
            {
                "eviction_options": {"profile": np.ones((2, 2))},
                "eviction": "static_oracle",
            },
            r"profile has shape \(2, 2\), expected \(3, 12\)",
        ),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        make_offloaded(StoreReader(GQA), OffloadOptions(**change))


@pytest.mark.parametrize("change", [{"predictor": "magic"}, {"memory": "tape"}])
def test_unknown_names_are_refused_at_once(change):
    with pytest.raises(ConfigError, match="magic|tape"):
        OffloadOptions(**change)


def test_huggingface_folder_cannot_be_mapped(checkpoints):
    with pytest.raises(ConfigError, match="convert it first"):
        load_engine(checkpoints[0], offload=OffloadOptions(memory="mmap"))


def test_budget_alone_takes_the_default_policies():
    policy = OffloadOptions(eviction="lfu", device_memory="30%")
    assert resolve_offload(None, None) is None
    assert resolve_offload(None, policy) is policy
    assert resolve_offload("20%", policy) == dataclasses.replace(
        policy, device_memory="20%"
    )
    bare = OffloadOptions(device_memory="20%")
    assert resolve_offload("20%", None) == bare
    assert (bare.slot_plan, bare.mode) == ("auto", "auto")


def test_auto_is_fused_on_a_gpu_where_nothing_needs_layered():
    def mode(backend="gpu", recorded=False, **options):
        return OffloadOptions(mode="auto", **options).choose_mode(backend, recorded)

    assert (mode(), mode("cpu")) == ("fused", "layered")
    assert mode(recorded=True) == "layered"
    assert mode(predictor="previous") == mode(memory="pinned") == "layered"
    for given in ("layered", "fused"):
        options = OffloadOptions(mode=given)
        assert options.choose_mode("cpu") == options.choose_mode("gpu") == given


def test_mode_names_the_engine_and_fused_writes_no_trace():
    for mode, kind in (("layered", LayeredEngine), ("fused", FusedEngine)):
        engine = make_offloaded(StoreReader(GQA), OffloadOptions(mode=mode))
        assert type(engine) is kind
        engine.close()
    with pytest.raises(ConfigError, match="mode fused writes no traces"):
        options = OffloadOptions(mode="fused")
        make_offloaded(StoreReader(GQA), options, with_trace=True)


# Blocks that a thread carries, also where the device shares the host's memory.
BY_THREAD = OffloadOptions(memory="pinned")


def test_closed_engine_lets_go_of_its_records():
    engine = make_offloaded(StoreReader(GQA), BY_THREAD)
    thread = engine.queue.carriers[0].thread
    assert thread.is_alive() and isinstance(engine.queue.store, HostStore)
    engine.close()
    engine.close()  # twice is as good
    assert not thread.is_alive()
    assert STEPS  # the engine is still there to be asked for its counters
    assert engine.movement()["bytes_moved"] == 0


@on_cpu
@pytest.mark.parametrize(
    "options, kind, is_serial",
    [
        ({}, CallerCarrier, False),
        ({"link_bytes_per_s": 1e9}, CallerCarrier, False),
        ({"memory": "pinned"}, ThreadCarrier, None),
        ({"asynchronous": False}, CallerCarrier, True),
    ],
)
def test_who_carries_depends_on_where_blocks_come_from(options, kind, is_serial):
    engine = make_offloaded(StoreReader(GQA), OffloadOptions(**options))
    (carrier,) = engine.queue.carriers
    assert type(carrier) is kind
    assert getattr(carrier, "_serial", None) == is_serial
    engine.close()


@pytest.fixture
def carriers(monkeypatch):
    """The queues that assemblies make."""
    made = []

    def make(*args, **kwargs):
        made.append(ThreadCarrier(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr("moe_edge.engine.make_layered.ThreadCarrier", make)
    return made


@pytest.mark.parametrize(
    "config, dtype, message",
    [
        (ALL["mla"], np.float32, "made for another model"),
        (GQA, np.uint16, "made for uint16 records, the slots hold float32"),
    ],
)
def test_refused_assembly_leaves_no_thread(carriers, config, dtype, message):
    programs = LayerPrograms(config, dtype)
    with pytest.raises(ConfigError, match=message):
        make_offloaded(StoreReader(GQA), BY_THREAD, programs=programs)
    (carrier,) = carriers
    assert not carrier.thread.is_alive()


def test_profile_trace_is_read_once(monkeypatch):
    counts_LE, read = np.ones((3, 12), np.int64), []
    monkeypatch.setattr(
        run_context, "count_trace", lambda *args: read.append(args) or counts_LE
    )
    options = OffloadOptions(eviction="static_oracle", profile_trace="of_the_model")
    with make_offloaded(StoreReader(GQA), options) as engine:
        assert engine.cache.policy.name == "static_oracle"
    assert len(read) == 1


def test_planned_slots_are_those_given():
    plan = {"slot_plan": "planned", "slot_plan_options": {"slots": [3, 6]}}
    with make_offloaded(StoreReader(GQA), OffloadOptions(**plan)) as engine:
        assert engine.cache.spec.layer_S == (1,) * 3 + (2,) * 6

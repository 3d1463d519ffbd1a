"""The offload suite's parts on tiny models; figures come from running it."""

import ast
import dataclasses
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from moe_edge.core.checks import CheckpointError
from moe_edge.core.process import alone, peak_rss_bytes
from moe_edge.engine.load import load_engine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.resident import ResidentEngine
from moe_edge.offload.link import EmulatedLink
from moe_edge.simulate.replay.recorded import Replayed
from moe_edge.simulate.replay.timed import CostModel, replay_time
from moe_edge.studies.speed import (
    models,
    offload,
    offload_accelerate,
    offload_assist,
    offload_links,
    offload_memory,
    runs,
)
from tests.support.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
TINY = models.olmoe_config(2, "bfloat16", experts=16) | {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 16,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "num_experts_per_tok": 2,
}
SIZES = runs.OffloadSettings(
    repeats=1,
    hf_config=TINY,
    large_config=TINY,
    link_steps={8.0: 4},
    host_steps=3,
    smoe_tokens=4,
    fidelity_rows=3,
    absolute_memory="1MB",
)
SLOW = EmulatedLink(bytes_per_s=4e6, latency_s=50e-6)  # about 1 ms a block


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.write_random(tmp_path_factory.mktemp("models") / "tiny", TINY)


@pytest.fixture(scope="module")
def engine(folder):
    engine = runs.load_offloaded(folder, device_memory="25%")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def prompts(engine):
    return runs.random_prompts(engine, 1, 16)


def test_run_starts_cold_and_moves_what_a_replay_misses(engine, prompts):
    first = runs.decode_run(engine, prompts, 5)
    again = runs.decode_run(engine, prompts, 5)
    assert first.used_blocks == again.used_blocks > 0
    costs = CostModel(1e-4, 1e-4, engine.queue.store.block_bytes, SLOW)
    played = offload_links.replayed(engine, first, costs)
    assert played.misses == first.used_blocks
    assert len(played.step_s) == len(first.step_s) == 5


def test_forced_runs_feed_other_tokens_and_a_shorter_one_is_their_beginning(
    engine, prompts
):
    greedy = runs.decode_run(engine, prompts, 6)
    long = runs.decode_run(engine, prompts, 6, forced=True)
    short = runs.decode_run(engine, prompts, 3, forced=True)
    assert np.array_equal(long.tokens[:4], short.tokens)
    assert not np.array_equal(long.tokens, greedy.tokens)


def test_run_over_a_link_takes_at_least_its_transfers(engine, prompts):
    run = runs.decode_run(engine, prompts, 3, SLOW)
    block_bytes = engine.queue.store.block_bytes
    assert run.step_s.sum() >= 0.99 * run.used_blocks * SLOW.seconds(block_bytes)
    assert 0 < run.waited_s < run.step_s.sum()


def test_foreseen_is_what_the_run_chose_after_the_prompt(engine, prompts):
    run = runs.decode_run(engine, prompts, 3)
    chosen_SLM = offload_links.foreseen(run, engine.config)
    assert chosen_SLM.shape == (4, 2, 2) and (chosen_SLM[0] == -1).all()
    assert chosen_SLM[2, 1].tolist() == run.log.lookups[2 + 1][1][0].tolist()


def test_replayed_repeats_a_runs_predictions_lookup_by_lookup(engine, prompts):
    run = runs.decode_run(engine, prompts, 4)
    follow = [ids_TK for _, ids_TK, _ in run.log.lookups[1:]]
    costs = CostModel(1.0, 1.0, engine.queue.store.block_bytes, SLOW)
    played = {
        name: replay_time(
            run.log.trace(16),
            engine.cache.policy,
            engine.cache.spec.layer_S,
            costs,
            Replayed(predicted),
        )
        for name, predicted in (("none", [None] * 8), ("all", [*follow, None]))
    }
    assert played["none"].moved.prefetch.bytes == 0 < played["none"].misses
    # Each lookup's predictions are for the next one: only the first can miss.
    assert played["all"].misses <= 2 and played["all"].moved.cancelled == 0


def test_check_same_tokens_names_the_first_difference():
    run = runs.TimedRun(np.zeros(2), np.array([[1], [2], [3]]))
    runs.check_same_tokens("x", run, run)
    other = dataclasses.replace(run, tokens=np.array([[1], [2], [4]]))
    with pytest.raises(RuntimeError, match="x is no lossless run: token 2"):
        runs.check_same_tokens("x", other, run)


def test_link_rows_stand_beside_their_bounds(folder):
    # A bound is timed a moment apart: beside other work a run may seem to beat it.
    for _ in range(9):
        rows = offload_links.link_rows(
            "tiny", folder, SIZES, ("none", "previous"), True
        )
        if min(row["ratio"] for row in rows) > 0.5:
            break
    names = [row["case"].rsplit(", ", 1)[1] for row in rows]
    controls = ["read-backs and copies", "compute after waits"]
    assert names == ["oracle", "none", "previous", *controls]
    beside, rested, plain = rows[3], rows[4], rows[1]
    assert beside["ours"] == rows[0]["ours"] and beside["limit_fraction"] is None
    lost_ms = rested["lost_by_waiting_ms_per_token"]
    assert lost_ms >= 0 and rested["ours"] == plain["ours"]
    assert rested["peer"] == pytest.approx(plain["peer"] + lost_ms)
    assert all("emulated" in row["case"] and row["emulated"] for row in rows)
    assert {row["link"]["latency_s"] for row in rows} == {50e-6}
    assert rows[0]["needed_blocks_per_token"] <= rows[1]["needed_blocks_per_token"]
    assert all(row["ratio"] > 0.5 for row in rows)


def layer_by_layer(folder):
    loaded = load_engine(folder, with_tokenizer=False).engine
    return ResidentEngine(loaded.weights, layers_per_program=1)


def test_layers_that_end_together_have_no_share(folder):
    engine = load_engine(folder, with_tokenizer=False).engine
    prompts = runs.random_prompts(engine, 1, 16)
    with pytest.raises(ValueError, match="8 layers a program"):
        runs.layer_share(engine, prompts, 2)


def test_step_after_waits_leaves_the_waiting_out(folder):
    engine = layer_by_layer(folder)
    prompts, step = runs.random_prompts(engine, 1, 16), runs.step_after_waits
    step(engine, prompts, 2, 0.0)  # compiles
    begun_s = time.perf_counter()
    step_s = step(engine, prompts, 2, 0.2)
    passed_s = time.perf_counter() - begun_s
    rested_s = 2 * engine.config.num_layers * 0.2
    assert rested_s < passed_s and 0 < 2 * step_s <= passed_s - rested_s


def test_step_beside_transfers_waits_for_its_blocks(folder):
    engine = layer_by_layer(folder)
    prompts = runs.random_prompts(engine, 1, 16)
    offloaded = runs.load_offloaded(folder, device_memory="25%")
    runs.decode_run(offloaded, prompts, 2)  # fills slots
    link = EmulatedLink(1e12, 0.02)
    assert (offloaded.cache.slot_LE >= 0).any()

    def step(blocks_per_step):
        return runs.step_beside_transfers(
            engine, offloaded, prompts, 4, link, blocks_per_step
        )

    step(0)  # compiles
    # The best one counts, for a busy machine delays.
    free_s, moved = min(map(step, [0] * 9)), offloaded.queue.stats().demand.count
    assert step(5) >= 5 * 0.02 * 0.9 > free_s
    assert offloaded.queue.stats().demand.count - moved == 20
    assert (offloaded.cache.slot_LE < 0).all() and not offloaded.queue.link.emulated
    offloaded.close()


def test_an_absent_expert_on_the_host_is_compared_with_its_bytes(folder):
    (row,) = offload_assist.assist_rows("tiny", folder, 2)
    assert row["unit"] == "us" and len(row["runs"]["ours"]) == 2
    assert row["block_bytes"] == 2 * 3 * 48 * 16  # gate, up and down of bfloat16
    rates = 1e6 * row["block_bytes"] / np.array(row["runs"]["peer"])
    assert row["bandwidth_bytes_per_s"] == pytest.approx(np.median(rates))
    assert row["peer"] == pytest.approx(np.median(row["runs"]["peer"]))
    assert row["ours"] > 0 and row["bar"] == 1.5  # the rows count what ran themselves


def test_host_rows_allow_a_copy_for_each_miss(folder):
    layered, all_hit, half = offload.host_rows("tiny", folder, SIZES, 1)
    assert layered["peer"] == 0.2 and layered["unit"] == "ms/layer"
    assert all_hit["misses_per_token"] == 0
    assert all_hit["peer"] == all_hit["resident_ms_per_token"]
    allowed = half["resident_ms_per_token"]
    allowed += 1.3 * half["misses_per_token"] * half["copy_ms_per_block"]
    assert half["misses_per_token"] > 0
    assert half["peer"] == pytest.approx(allowed)


def test_device_rows_count_slots_weights_and_cache(folder):
    absolute, relative = offload_memory.device_rows("tiny", folder, SIZES)
    assert 0.1 < absolute["ours"] < absolute["peer"] == 1.0
    parts = relative["bytes_of"]
    assert parts["slots"] == 8 * 3 * 48 * 16 * 2  # 25 % of 2 x 16 bfloat16 experts
    assert relative["peer"] == pytest.approx(sum(parts.values()) / 1e6)
    assert relative["ours"] >= relative["peer"]  # activations come on top
    assert relative["samples"] == 3 * 2  # steps, layers


def test_live_bytes_counts_shared_memory_once():
    before = offload_memory.live_bytes()
    array = jax.device_put(np.zeros(1 << 20, np.uint8)).block_until_ready()
    same = jax.device_put(array, jax.devices()[0])
    assert offload_memory.live_bytes() - before == 1 << 20
    del same


def test_process_rows_bound_is_checkpoint_slots_and_runtime(tmp_path, monkeypatch):
    def child(function, checkpoint, memory, budget):
        peak = 1000 if "tiny" in checkpoint.name else 5000
        return {"peak_rss_bytes": peak, "slot_bytes": 7, "memory": memory}

    monkeypatch.setattr(offload_memory, "alone", child)
    rows = offload_memory.process_rows(tmp_path, SIZES)
    ours = tmp_path / "olmoe_large_ours"
    size = sum(path.stat().st_size for path in ours.rglob("*") if path.is_file())
    assert [row["memory"] for row in rows] == ["host", "mmap"]
    assert rows[0]["peer"] * 1e6 == pytest.approx(1.1 * size + 7 + 1000)
    assert rows[0]["ours"] * 1e6 == pytest.approx(5000)


def test_accelerate_is_the_better_of_its_ways(tmp_path, monkeypatch):
    took_s = {"eager": 3.0, "grouped_mm": 2.0}
    monkeypatch.setattr(offload_accelerate, "installed", lambda *names: True)
    monkeypatch.setattr(
        offload_accelerate, "alone", lambda function, *at: took_s.get(at[-1], 0.5)
    )
    (row,) = offload_accelerate.accelerate_rows(tmp_path, tmp_path / "ours", 3)
    assert (row["ours"], row["peer"], row["ratio"]) == (500.0, 2000.0, 0.25)
    assert row["peer_name"] == "accelerate, disk offload (grouped_mm)"
    monkeypatch.setattr(offload_accelerate, "installed", lambda *names: False)
    assert offload_accelerate.accelerate_rows(tmp_path, tmp_path / "ours", 3) == []


@pytest.mark.parametrize(("layers", "kept"), [(4, 1), (18, 5), (32, 8)])
def test_accelerate_keeps_at_least_our_share(layers, kept):
    places = list(offload_accelerate.layer_places(layers).values())
    assert places.count("disk") == layers - kept


def test_measure_in_a_process_of_its_own(folder):
    found = alone(offload_memory.measure, folder, "host", "50%")
    assert found["slot_bytes"] == 16 * 3 * 48 * 16 * 2
    # Bare runtime: far less than this process with all its compiled programs.
    assert 10**8 < found["peak_rss_bytes"] <= 4 * peak_rss_bytes()
    assert found["used_blocks"] > 0
    with pytest.raises(CheckpointError, match="missing"):
        alone(offload_memory.measure, folder / "missing", "host", "50%")


def test_smoe_options_are_those_of_the_policy_file():
    text = (ROOT / "configs" / "policies" / "smoe.gin").read_text()
    found = {}
    for line in text.splitlines():
        if line.startswith("offload."):
            name, value = line.removeprefix("offload.").split(" = ", 1)
            found[name] = ast.literal_eval(value)
    found["mode"] = "layered"  # what `auto` is where there is a predictor
    assert OffloadOptions(**found) == offload.SMOE


def test_smoe_rows_give_time_and_fidelity(tmp_path, monkeypatch):
    tiny = write_tiny_checkpoint(tmp_path / "tiny")
    monkeypatch.setattr(offload, "DEFAULT_MODEL", tiny)
    monkeypatch.setattr(offload, "LOSSLESS", {"lru": {}})
    row, without = offload.smoe_rows(SIZES)
    assert row["peer_name"] == "best lossless: lru"
    assert row["ratio"] == without["ratio"] > 0
    assert row["fidelity"]["tokens"] == 3 * 4
    assert 0 <= row["fidelity"]["agreement"] <= 1


def test_offload_models_are_named_for_the_entry(tmp_path):
    names = [name for name, _ in offload.offload_models(SIZES, tmp_path)]
    assert names == ["olmoe_d512", "default", "olmoe_large"]

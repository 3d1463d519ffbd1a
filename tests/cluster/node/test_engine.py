"""A model on several servers gives the resident engine's bits, wherever blocks are."""

import threading

import jax
import numpy as np
import pytest

from moe_edge.cluster.node.remote import LostBlocks
from moe_edge.cluster.node.warm_up import warm_up
from tests.support.layered import (
    BLOCKS,
    CAPACITY,
    NINE,
    THREE,
    assert_same_bits,
    forced_logits,
)
from tests.support.tiny_models import ALL, BF16, random_prompts
from tests.support.tiny_servers import Servers, spread

BITS = ("gqa", BF16)
STEPS = 12


def counted(engine):
    engine.ledger.counts()
    return engine.ledger


@pytest.mark.slow
def test_warm_up_compiles_all_that_any_placement_runs(monkeypatch):
    """It stands first: those after it compile some of the same programs."""
    first = Servers(*BITS, spread(ALL["gqa"], 3))
    answers, programs = first.transport.answers[0], first.engines[0].programs
    rows, computed = programs.rows, set()

    def noted(x_TD, *more):
        computed.add((len(x_TD), isinstance(x_TD, jax.Array)))  # else a call's
        return rows(x_TD, *more)

    monkeypatch.setattr(programs, "rows", noted)
    warm_up(first.engines[0], answers, [(9, CAPACITY - 9), (40, CAPACITY - 40)])
    # Of a token some are computed here and some elsewhere, whatever it has chosen.
    monkeypatch.undo()
    assert {(1, True), (16, True), (48, True)} <= computed
    before = first.engines[0].num_compiled()
    for seed in range(3):
        held_NLE = spread(ALL["gqa"], 3, seed=seed, copies=0.2)
        servers = Servers(*BITS, held_NLE)
        for lengths in (NINE, (40,)):
            assert_same_bits(servers.engines[0], *BITS, lengths, STEPS)
    assert first.engines[0].num_compiled() == before


@pytest.mark.parametrize(
    "name, dtype, num_servers",
    [
        *((*BITS, num_servers) for num_servers in (1, 2, 4)),
        ("mla_bias", np.float32, 2),
        pytest.param("mla_bias", np.float32, 1, marks=pytest.mark.slow),
        pytest.param("mla_bias", np.float32, 4, marks=pytest.mark.slow),
        pytest.param("q8_0", np.float32, 2, marks=pytest.mark.slow),
        pytest.param("parts", np.float32, 2, marks=pytest.mark.slow),
        pytest.param("mixed", np.float32, 2, marks=pytest.mark.slow),
    ],
)
def test_any_placement_gives_the_resident_bits(name, dtype, num_servers):
    servers = Servers(name, dtype, spread(ALL[name], num_servers, copies=0.2))
    for engine in servers.engines:
        assert_same_bits(engine, name, dtype, NINE, STEPS)
    assert bool(servers.transport.calls) == (num_servers > 1)


def test_caches_in_fewer_bytes_give_the_resident_bits(monkeypatch):
    name = "bfloat16 caches"
    monkeypatch.setitem(ALL, name, ALL["gqa"].with_cache("bfloat16"))
    (engine, _) = Servers(name, BF16, spread(ALL[name], 2)).engines
    assert engine.new_cache(0, 1, CAPACITY)["k"].dtype == np.uint16
    assert_same_bits(engine, name, BF16, NINE, STEPS)


@pytest.mark.parametrize("length", [1, 16, 40])
def test_prompts_of_any_length_give_the_resident_bits(length):
    servers = Servers(*BITS, spread(ALL["gqa"], 3))
    assert_same_bits(servers.engines[1], *BITS, (length,), 2)


def test_rows_of_a_batch_give_the_resident_bits():
    servers = Servers(*BITS, spread(ALL["gqa"], 3))
    assert_same_bits(servers.engines[0], *BITS, THREE, STEPS)


def test_a_server_without_blocks_computes_none_and_gives_the_resident_bits():
    held_NLE = spread(ALL["gqa"], 2)
    held_NLE[1] |= held_NLE[0]
    held_NLE[0] = False
    servers = Servers(*BITS, held_NLE, slots=[0, BLOCKS + 1])
    assert_same_bits(servers.engines[0], *BITS, NINE, STEPS)
    assert counted(servers.engines[0]).local_pairs == 0
    assert {peer for peer, _ in servers.transport.calls} == {1}


def test_one_call_a_layer_and_server_with_the_states_it_needs():
    servers = Servers(*BITS, spread(ALL["gqa"], 3))
    assert_same_bits(servers.engines[0], *BITS, NINE, STEPS)
    seen = {}
    for peer, call in servers.transport.calls:
        if len(call.x_TD) == 1:
            seen.setdefault(call.layer, []).append(peer)
    ledger = counted(servers.engines[0])
    assert ledger.states == sum(len(c.x_TD) for _, c in servers.transport.calls)
    assert ledger.rows == ledger.pairs - ledger.local_pairs
    assert set(seen) == {1, 2}
    assert all(len(peers) <= 2 * STEPS for peers in seen.values())


def test_lost_server_with_a_replica_is_replaced_within_the_step():
    held_NLE = spread(ALL["gqa"], 3)
    held_NLE[2] |= held_NLE[1]  # 2 has all of 1
    servers = Servers(*BITS, held_NLE)
    engine = servers.engines[0]

    def lose(server, kind):
        assert (server, kind) == (1, "dead")
        left_NLE = held_NLE.copy()
        left_NLE[1] = False
        # The table comes from another thread, while the step waits.
        threading.Timer(0.02, servers.place, (left_NLE, False)).start()

    engine.remote._on_lost = lose
    tokens = iter(range(100))

    def on_routing(layer, routing):
        if next(tokens) == 9:  # in the middle of a decode step
            servers.transport.lost.add(1)
        servers.tables[0].install() if layer == 1 else None

    assert_same_bits(engine, *BITS, NINE, STEPS, on_routing=on_routing)
    assert servers.tables[0].view.version >= 2


def test_blocks_that_nobody_has_are_read_for_each_call():
    held_NLE = spread(ALL["gqa"], 3)
    servers = Servers(*BITS, held_NLE)
    target_NLE = np.stack([servers.tables[n].view.target_LE[:, :-1] for n in range(3)])
    target_NLE[target_NLE == 2] = 0  # server 0 is to compute what 2 held
    servers.transport.lost.add(2)
    servers.target(target_NLE)
    for lengths in (NINE, (40,)):
        assert_same_bits(servers.engines[0], *BITS, lengths, STEPS)
    held = servers.holdings[0]
    assert held.most_used == held_NLE[0].sum() + 1
    assert not (held.held_LE & ~held_NLE[0]).any()  # not kept


def test_block_that_was_dropped_is_asked_for_where_the_next_table_says():
    held_NLE = spread(ALL["gqa"], 2)
    held_NLE[0] = True
    held_NLE[0, 0] = False
    servers = Servers(*BITS, held_NLE)
    target_NLE = np.stack([servers.tables[n].view.target_LE[:, :-1] for n in range(2)])
    layer, block = np.argwhere(held_NLE[1])[0]
    asked = target_NLE.copy()
    asked[0] = np.where(held_NLE[1], 1, 0)
    servers.target(asked)  # 0 calls 1, though it has all
    servers.holdings[1].drop(np.argwhere(held_NLE[1]).tolist())
    servers.target(target_NLE, install=False)
    assert_same_bits(servers.engines[0], *BITS, NINE, STEPS)


def test_without_a_newer_table_the_request_ends_with_one_line():
    servers = Servers(*BITS, spread(ALL["gqa"], 2))
    servers.transport.lost.add(1)
    with pytest.raises(LostBlocks, match="server 1 did not compute blocks of layer 1"):
        forced_logits(servers.engines[0], random_prompts(ALL["gqa"], NINE), 1)


def test_tables_of_a_new_run_count_from_zero_and_replace_those_of_the_last():
    held_NLE = spread(ALL["gqa"], 2)
    servers = Servers(*BITS, held_NLE)
    other_NLE = held_NLE[::-1].copy()
    for me in (0, 1):
        servers.holdings[me].fill(other_NLE[me])
        target_LE = np.where(other_NLE[me], me, 1 - me).astype(np.int16)
        servers.tables[me].begin(0, target_LE)
    assert_same_bits(servers.engines[0], *BITS, NINE, STEPS)
    assert servers.tables[0].view.version == 0


@pytest.mark.slow
def test_servers_of_several_devices_give_the_resident_bits():
    """Rows of calls too: two servers ask each other. Nothing compiles on the way."""
    devices = jax.local_devices()[:3]
    servers = Servers(*BITS, spread(ALL["gqa"], 2), devices=devices)
    first, answers = servers.engines[0], servers.transport.answers[0]
    warm_up(first, answers, [(40, CAPACITY - 40)])  # in blocks, then in pairs
    compiled = first.num_compiled()
    assert_same_bits(first, *BITS, (40,), STEPS)
    assert first.num_compiled() == compiled
    assert len(servers.transport.calls) > STEPS
    holdings = servers.holdings[0]
    for array, device in zip(holdings.array, devices, strict=True):
        assert array.devices() == {device}
    slots = holdings.slot_LE[holdings.held_LE]
    held_N = np.bincount(holdings.homes.home_S[slots])
    assert held_N.max() - held_N.min() <= 1 and held_N.sum() == len(slots)
    layer, block = np.argwhere(holdings.held_LE)[0]
    record_R = holdings.record(layer, block)
    np.testing.assert_array_equal(record_R, holdings.blocks.read(layer, block))

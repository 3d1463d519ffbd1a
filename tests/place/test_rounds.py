"""Migration in rounds: laws over random tables; a table after servers died."""

import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.place.call_targets import call_targets
from moe_edge.place.rounds import Arrival, next_round, recover


def random_table(rng, capacity_N, shape):
    """bool [N, L, E] that covers every block and fills `capacity_N`."""
    N, X = len(capacity_N), shape[0] * shape[1]
    while True:
        held_NX = np.zeros((N, X), bool)
        owners = np.repeat(np.arange(N), np.minimum(capacity_N, X))
        for x, n in enumerate(rng.permutation(owners)[:X]):
            held_NX[n, x] = True
        for n, capacity in enumerate(capacity_N):
            empty = np.flatnonzero(~held_NX[n])
            count = min(capacity - held_NX[n].sum(), len(empty))
            held_NX[n, rng.permutation(empty)[:count]] = True
        if held_NX.any(axis=0).all():
            order = rng.permutation(X)
            return held_NX[:, order].reshape(N, *shape)


def random_case(rng):
    """A table and a candidate, mostly tight; the table may fill the spare slots."""
    N, L, E = int(rng.integers(2, 6)), int(rng.integers(1, 4)), int(rng.integers(2, 9))
    weight_N = rng.dirichlet(np.ones(N))
    total = int(L * E * rng.choice([1.0, 1.0, 1.1, 1.5, 2.5]))
    capacity_N = np.floor(weight_N * total).astype(int)
    capacity_N[rng.integers(N)] += total - capacity_N.sum()
    capacity_N = np.minimum(capacity_N, L * E)
    capacity_N[capacity_N.argmax()] += max(0, L * E - capacity_N.sum())
    slots_N = capacity_N + rng.integers(1, 3, N) * rng.choice([1, 1, 4])
    held_NLE = random_table(rng, capacity_N, (L, E))
    if rng.random() < 0.5:  # more copies than the last placement, up to the brim
        for n in range(N):
            empty = np.argwhere(~held_NLE[n])
            room = slots_N[n] - held_NLE[n].sum()
            for layer, block in rng.permutation(empty)[:room]:
                held_NLE[n, layer, block] = True
    return held_NLE, random_table(rng, capacity_N, (L, E)), slots_N


def moved(held_NLE, wanted_NLE, slots_N, calls_NLE, **options):
    """All rounds, each checked at every instant."""
    rounds, table_NLE = [], held_NLE
    while True:
        one = next_round(table_NLE, wanted_NLE, slots_N, calls_NLE, **options)
        if one is None:
            return rounds, table_NLE
        assert one.arrivals or one.drops
        then_NLE = table_NLE.copy()
        for server, layer, block, source in one.arrivals:
            assert wanted_NLE[server, layer, block]
            assert not then_NLE[server, layer, block]
            assert source == server or table_NLE[source, layer, block]
            then_NLE[server, layer, block] = True
        assert (then_NLE.sum(axis=(1, 2)) <= slots_N).all()
        for copy in one.drops:
            assert then_NLE[copy] and not wanted_NLE[copy]
            then_NLE[copy] = False
        assert then_NLE.any(axis=0).all()
        assert (then_NLE == one.held_NLE).all()
        rounds.append(one)
        table_NLE = one.held_NLE


@pytest.mark.parametrize("most", [None, 1, 3])
@pytest.mark.parametrize("source", ["host", "network"])
def test_every_block_is_held_and_no_slot_exceeded_until_the_end(source, most):
    rng = np.random.default_rng([most or 0, len(source)])
    rounds_seen = 0
    for _ in range(300):
        held_NLE, wanted_NLE, slots_N = random_case(rng)
        calls_NLE = rng.integers(0, 4, held_NLE.shape)
        rounds, end_NLE = moved(
            held_NLE, wanted_NLE, slots_N, calls_NLE, source=source, most=most
        )
        assert (end_NLE == wanted_NLE).all()
        arrivals = [one[:3] for r in rounds for one in r.arrivals]
        assert len(arrivals) == len(set(arrivals))  # no copy comes twice
        assert len(arrivals) == (wanted_NLE & ~held_NLE).sum()
        rounds_seen = max(rounds_seen, len(rounds))
    assert rounds_seen > 3  # some had to wait for each other


def test_two_full_servers_exchange_all_their_blocks_one_by_one():
    held_NLE = np.array([[[1, 1, 1, 0, 0, 0]], [[0, 0, 0, 1, 1, 1]]], bool)
    slots_N = np.array([4, 4])
    calls_NLE = np.array([[[0, 0, 0, 1, 3, 2]], [[2, 3, 1, 0, 0, 0]]])
    rounds, _ = moved(held_NLE, held_NLE[::-1], slots_N, calls_NLE, source="network")
    shown = [([one[:3] for one in r.arrivals], r.drops) for r in rounds]
    assert shown == [
        ([(0, 0, 4), (1, 0, 1)], [(0, 0, 1), (1, 0, 4)]),
        ([(0, 0, 5), (1, 0, 0)], [(0, 0, 0), (1, 0, 5)]),
        ([(0, 0, 3), (1, 0, 2)], [(0, 0, 2), (1, 0, 3)]),
    ]
    assert [one.source for one in rounds[0].arrivals] == [1, 0]


def test_a_copy_that_lets_another_leave_comes_first():
    # Server 0 gets blocks 2 (called more, but server 1 keeps it) and 3, which server
    # 1 shall give up for block 0.
    held_NLE = np.array([[[1, 1, 0, 0]], [[0, 0, 1, 1]]], bool)
    wanted_NLE = np.array([[[1, 0, 1, 1]], [[1, 1, 1, 0]]], bool)
    calls_NLE = np.array([[[0, 0, 9, 1]], [[5, 0, 0, 0]]])
    one = next_round(held_NLE, wanted_NLE, np.array([4, 3 + 1]), calls_NLE, most=1)
    assert one.arrivals == [Arrival(0, 0, 3, 0), Arrival(1, 0, 1, 1)]
    assert one.drops == [(0, 0, 1), (1, 0, 3)]


def test_blocks_come_from_their_holders_by_turns_and_else_from_the_checkpoint():
    held_NLE = np.array([[[0] * 5], [[1, 1, 1, 1, 0]], [[1, 1, 1, 0, 0]]], bool)
    wanted_NLE = held_NLE.copy()
    wanted_NLE[0] = True
    none_NLE = np.zeros((3, 1, 5))
    one = next_round(held_NLE, wanted_NLE, np.full(3, 6), none_NLE, source="network")
    sources = {block: source for _, _, block, source in one.arrivals}
    assert sources == {4: 0, 0: 1, 1: 2, 2: 1, 3: 1} and not one.drops


def test_the_last_copy_stays_where_there_is_most_room():
    # Block 0 leaves servers 0 and 1 for server 2, which is full of what leaves it.
    held_NLE = np.array([[[1, 0, 1]], [[1, 0, 0]], [[0, 1, 1]]], bool)
    wanted_NLE = np.array([[[0, 1, 0]], [[0, 0, 1]], [[1, 0, 0]]], bool)
    slots_N = np.array([2, 4, 2])
    one = next_round(held_NLE, wanted_NLE, slots_N, np.zeros((3, 1, 3)))
    assert one.arrivals == [Arrival(1, 0, 2, 1)]
    assert (0, 0, 0) in one.drops and (1, 0, 0) not in one.drops


def test_at_the_end_there_is_no_round():
    held_NLE = np.ones((2, 1, 2), bool)
    assert next_round(held_NLE, held_NLE, np.array([2, 2]), held_NLE * 0) is None


def test_what_cannot_move_is_refused():
    held_NLE = np.array([[[1, 1, 0]], [[0, 0, 1]]], bool)
    wanted_NLE, calls = held_NLE[::-1], np.zeros((2, 1, 3))
    cases = {
        "server 0 holds 2 blocks in 1 slots": (wanted_NLE, [1, 3], {}),
        "server 1 is to hold 2 blocks in 2 slots; migrating needs a spare": (
            wanted_NLE,
            [3, 2],
            {},
        ),
        "1 blocks are on no server, the first is number 2": (
            held_NLE & [[[1, 1, 0]]],
            [3, 3],
            {},
        ),
    }
    for message, (wanted, slots, options) in cases.items():
        with pytest.raises(CapacityError, match=message):
            next_round(held_NLE, wanted, np.array(slots), calls, **options)
    with pytest.raises(ConfigError, match="unknown source of blocks 'disk'"):
        next_round(held_NLE, wanted_NLE, np.array([3, 3]), calls, source="disk")
    with pytest.raises(ConfigError, match=r"slots_N has shape \(3,\), expected \(2,\)"):
        next_round(held_NLE, wanted_NLE, np.array([3, 3, 3]), calls)


def test_lost_blocks_are_shared_out_by_calls_into_free_slots():
    # Server 0 dies: of its five blocks 4 has a copy on server 2.
    held_NLE = np.zeros((3, 1, 8), bool)
    held_NLE[0, 0, :5] = held_NLE[1, 0, 5:7] = held_NLE[2, 0, [4, 7]] = True
    calls_NLE = np.zeros((3, 1, 8))
    calls_NLE[0, 0, :4] = [1, 4, 3, 0]
    calls_NLE[2, 0, 0] = 1
    alive_N = np.array([False, True, True])
    found = recover(held_NLE, alive_N, np.array([9, 3, 4]), calls_NLE)
    assert found.lost == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert found.loads == [
        Arrival(1, 0, 1, 1),
        Arrival(2, 0, 2, 2),
        Arrival(2, 0, 0, 2),
    ]
    assert found.on_demand == [(0, 3)]
    assert not found.held_NLE[0].any() and found.held_NLE[1:].sum() == 4
    targets_NLE = call_targets(found.loaded_NLE, nobody=-1)
    assert targets_NLE[1, 0].tolist() == [2, 1, 2, -1, 2, 1, 1, 2]


@pytest.mark.parametrize("seed", range(3))
def test_recovery_fills_free_slots_before_it_gives_up(seed):
    rng = np.random.default_rng(seed)
    for _ in range(100):
        held_NLE, _, slots_N = random_case(rng)
        alive_N = rng.random(len(slots_N)) < 0.6
        calls_NLE = rng.integers(0, 9, held_NLE.shape)
        found = recover(held_NLE, alive_N, slots_N, calls_NLE)
        used_N = found.loaded_NLE.sum(axis=(1, 2))
        assert (used_N[alive_N] <= slots_N[alive_N]).all()
        assert not used_N[~alive_N].any()
        assert len(found.loads) + len(found.on_demand) == len(found.lost)
        if found.on_demand:
            assert (used_N[alive_N] == slots_N[alive_N]).all()
        gone_LE = ~found.loaded_NLE.any(axis=0)
        assert sorted(found.on_demand) == [*map(tuple, np.argwhere(gone_LE).tolist())]

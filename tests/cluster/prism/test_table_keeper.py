"""Laws of the table through migrations, losses and repeats in any order of events.

Servers are simulated: each takes what it is told in order, but whenever it likes, and
what it answers arrives whenever it likes. So thousands of orders are tried in seconds.
"""

import collections
import time
from collections.abc import Sequence

import numpy as np
import pytest

from moe_edge.cluster.prism.table_keeper import TableKeeper
from moe_edge.cluster.scheduler.accusations import Accusations
from moe_edge.cluster.scheduler.requests import NobodyLeft
from moe_edge.place.migrate import Decision
from moe_edge.place.migration_policy import Proposal
from moe_edge.place.plan import Placement
from moe_edge.workload.cluster_run import ClusterFacts, write_migrations
from moe_edge.workload.cluster_run_reader import read_migrations
from tests.support.slow_cases import slow

L, E = 2, 4
LAYERS = (1, 3)  # of a model of four
COUNT = L * E


class SimulatedServer:
    """What a server does with orders: slots, the table that it goes by."""

    def __init__(self, world: "World", me: int, slots: int, held_LE, target_LE):
        self.world, self.me, self.slots = world, me, slots
        self.held = {tuple(cell) for cell in np.argwhere(held_LE).tolist()}
        self.target_LE, self.version = target_LE.copy(), 0
        self.read_LE = np.zeros((L, E), bool)
        self.told: collections.deque = collections.deque()  # in order
        self.said: collections.deque = collections.deque()  # to the scheduler
        self.errands: collections.deque = collections.deque()  # of its second thread

    def act(self, rng) -> None:
        """The next thing that it was told, or a block that it is to bring."""
        if self.errands and (not self.told or rng.random() < 0.5):
            self._bring_one(rng)
            return
        if not self.told:
            return
        name, fields, arrays = self.told.popleft()
        if name == "table":
            assert fields["version"] == self.version + 1
            self.version = fields["version"]
            self.target_LE = arrays["target_LE"][list(LAYERS)]
            self.read_LE = arrays["read_LE"][list(LAYERS)]
            self.said.append(("confirmed", {"version": self.version}))
        elif name == "drop":
            for cell in _cells(arrays):
                assert cell in self.held
                self.held.discard(cell)
                self.world.check_nobody_asks(self.me, cell)
        elif name == "bring":
            cells = [(*cell, source) for cell, source in _sources(arrays)]
            self.errands.append((fields["order"], cells, []))

    def _bring_one(self, rng) -> None:
        order, cells, own = self.errands[0]
        if cells:
            layer, block, source = cells.pop()
            there = source >= 0 and (layer, block) in self.world.held_by(source)
            if not there or rng.random() < 0.05:
                own.append((LAYERS[layer], block))
            self.held.add((layer, block))
            assert len(self.held) < self.slots  # one is free for reading, always
        else:
            self.errands.popleft()
            self.said.append(("arrived", {"order": order, "own": own}))


def _cells(arrays) -> list[tuple[int, int]]:
    return [(LAYERS.index(layer), block) for layer, block in arrays["cells"].tolist()]


def _sources(arrays):
    for layer, block, source in arrays["cells"].tolist():
        yield (LAYERS.index(layer), block), source


class World:
    """A scheduler's list of servers, as far as the keeper needs it."""

    moe_layers, shape_LE = list(LAYERS), (4, E)

    def __init__(self, slots: Sequence[int]):
        self.slots_N = np.array(slots)
        self.alive_N = np.ones(len(slots), bool)
        self.accusations = Accusations()
        self.servers: list[SimulatedServer] = []

    @property
    def alive(self):
        return np.flatnonzero(self.alive_N).tolist()

    def tell(self, server, name, fields=None, arrays=None):
        assert self.alive_N[server]
        self.servers[server].told.append((name, fields, arrays))

    def held_by(self, server):
        return self.servers[server].held if self.alive_N[server] else set()

    def check_nobody_asks(self, server: int, cell) -> None:
        """A copy may go only if no server's table counts on it."""
        for other in map(self.servers.__getitem__, self.alive):
            assert other.target_LE[cell] != server or other.read_LE[cell]

    def check(self, keeper: TableKeeper, was_lost: bool) -> None:
        """Every block is somewhere, and all tables name servers that have it."""
        lost = set(keeper.degraded)
        if not was_lost:
            assert not lost
            for cell in np.ndindex(L, E):
                assert any(cell in self.servers[n].held for n in self.alive)
        if was_lost:
            return  # callers may still go by a table that names the lost
        for n in self.alive:
            for cell in np.ndindex(L, E):
                holder = int(self.servers[n].target_LE[cell])
                assert cell in self.servers[holder].held


class StubJudge:
    """Proposes random placements within the room that it is told."""

    source = "host"

    def __init__(self, rng, slots, network):
        self.rng, self.slots = rng, slots
        self.source = "network" if network else "host"
        self.calls_NLE = rng.random((len(slots), L, E))

    def begin(self, begun_s):
        pass

    def forget(self, server):
        pass

    def is_due(self):
        return True

    def propose(self, held_NLE, room_N):
        on_NLE = random_placement(self.rng, room_N)
        if on_NLE is None:
            return None
        placement = Placement(np.where(on_NLE, 0, -1))
        return Proposal(placement, Decision(True, 0, 0, 0, 0), self.calls_NLE)


def random_placement(rng, room_N) -> np.ndarray | None:
    """bool [N, L, E]: covers every block within the room, if there is enough."""
    if room_N.sum() < COUNT:
        return None
    held_NX = np.zeros((len(room_N), COUNT), bool)
    places = np.repeat(np.arange(len(room_N)), room_N)
    held_NX[rng.permutation(places)[:COUNT], np.arange(COUNT)] = True
    for n, room in enumerate(room_N.tolist()):
        more = rng.permutation(np.flatnonzero(~held_NX[n]))
        held_NX[n, more[: rng.integers(0, room - held_NX[n].sum() + 1)]] = True
    return held_NX.reshape(-1, L, E)


def start(rng, slots, network=False):
    """(world, keeper) of servers that hold a random placement."""
    world = World(slots)
    held_NLE = random_placement(rng, np.maximum(world.slots_N - 1, 0))
    keeper = TableKeeper(world, held_NLE, StubJudge(rng, slots, network))
    np.testing.assert_array_equal(keeper.start_NLE, held_NLE)
    targets_NLE = keeper._routes(world.alive_N).target_NLE
    world.servers = [
        SimulatedServer(world, n, slots[n], held_NLE[n], targets_NLE[n])
        for n in range(len(slots))
    ]
    keeper.begin(0.0)
    return world, keeper


def hear(world, keeper, server: int) -> None:
    """The scheduler takes the next thing that a server has said."""
    one = world.servers[server]
    if one.said and world.alive_N[server]:
        name, fields = one.said.popleft()
        getattr(keeper, name)(server, fields, time.perf_counter())


def lose(world, keeper, server: int) -> None:
    world.alive_N[server] = False
    keeper.lost(server)


def quiet(world) -> bool:
    return not any(
        world.servers[n].told or world.servers[n].said or world.servers[n].errands
        for n in world.alive
    )


def replay(keeper, slots, allow_lost) -> None:
    """The written changes say who held what: every block at every version."""
    held_NLE = keeper.start_NLE.copy()
    for number, change in enumerate(keeper.table.changes):
        assert change.version == number + 1
        for cell in change.moves:
            held_NLE[tuple(cell)] = True
        assert (held_NLE.sum(axis=(1, 2)) <= slots).all()
        for cell in change.drops:
            assert held_NLE[tuple(cell)]
            held_NLE[tuple(cell)] = False
        assert allow_lost or held_NLE.any(axis=0).all()
    np.testing.assert_array_equal(held_NLE, keeper.held_NLE)


@pytest.mark.parametrize("network", [*slow(False), True])
@pytest.mark.parametrize(
    "slots", [(6, 6, 6), (9, 4, 4), (9, 9), (0, 7, 7), (5, 5, 5, 4)]
)
def test_migrations_keep_every_block_within_the_slots(slots, network):
    moved = 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        world, keeper = start(rng, slots, network)
        for step in range(500):
            server = int(rng.integers(len(slots)))
            action = rng.random()
            if action < 0.45:
                world.servers[server].act(rng)
            elif action < 0.9:
                hear(world, keeper, server)
            elif action < 0.99:
                keeper.tick(busy=step < 400)
            else:
                keeper.repeat()
            world.check(keeper, was_lost=False)
        finish(world, keeper, rng)
        replay(keeper, slots, allow_lost=False)
        moved += keeper.table.moved
    assert moved >= 100


def finish(world, keeper, rng) -> None:
    """Lets all do what is left; nothing may wait for ever."""
    keeper.settle()
    for _ in range(2000):
        for n in world.alive:
            world.servers[n].act(rng)
            hear(world, keeper, n)
        if quiet(world):
            break
    assert quiet(world) and not keeper.under_way
    for n in world.alive:
        held_LE = np.zeros((L, E), bool)
        for cell in world.servers[n].held:
            held_LE[cell] = True
        np.testing.assert_array_equal(held_LE, keeper.held_NLE[n])
        assert world.servers[n].version == keeper.table.version


@pytest.mark.parametrize("network", [*slow(False), True])
@pytest.mark.parametrize(
    "slots", [(6, 6, 6), (9, 4, 4), (9, 9, 9), (6, 0, 6), (4, 4, 4, 5)]
)
def test_losses_at_any_time_leave_a_table_that_works(slots, network):
    degraded = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        world, keeper = start(rng, slots, network)
        strikes = sorted(rng.integers(20, 400, rng.integers(1, len(slots))).tolist())
        for step in range(500):
            server = int(rng.integers(len(slots)))
            action = rng.random()
            if strikes and step >= strikes[0]:
                strikes.pop(0)
                victim = int(rng.choice(world.alive))
                left_N = world.alive_N.copy()
                left_N[victim] = False
                if not (world.slots_N[left_N] > 0).any():
                    with pytest.raises(NobodyLeft, match="have no slots"):
                        lose(world, keeper, victim)
                    break
                lose(world, keeper, victim)
            elif action < 0.45 and world.alive_N[server]:
                world.servers[server].act(rng)
            elif action < 0.9:
                hear(world, keeper, server)
            elif action < 0.99:
                keeper.tick(busy=True)
            else:
                keeper.repeat()
            world.check(keeper, was_lost=not world.alive_N.all())
        else:
            mend(world, keeper, rng)
            replay(keeper, slots, allow_lost=True)
            degraded += bool(keeper.degraded)
            finish(world, keeper, rng)
    room = np.array(slots) - 1
    if room.sum() - room.max() < COUNT:
        assert degraded


@pytest.mark.parametrize("slots", [(6, 6, 6), (9, 4, 4), (9, 0, 9), (4, 4, 4, 5)])
def test_servers_that_do_not_reach_each_other_are_routed_around(slots):
    found = collections.Counter()
    for seed in range(10):
        rng = np.random.default_rng(seed)
        world, keeper = start(rng, slots)
        bad = world.accusations.bad
        for _ in range(400):
            server = int(rng.integers(len(slots)))
            action, pair = rng.random(), tuple(rng.permutation(len(slots))[:2].tolist())
            if action < 0.45:
                world.servers[server].act(rng)
            elif action < 0.9:
                hear(world, keeper, server)
            elif action < 0.96:
                keeper.tick(busy=True)
            elif action < 0.98 and pair not in bad and slots[pair[0]]:
                bad.add(pair)
                keeper.apart(*pair)
            elif bad:
                bad.discard(sorted(bad)[int(rng.integers(len(bad)))])
                keeper.repeat()
            assert not keeper.degraded
            for cell in np.ndindex(L, E):
                assert any(cell in server.held for server in world.servers)
        let_act(world, keeper, rng)
        free_N = world.slots_N - keeper.held_NLE.sum(axis=(1, 2))
        for n in world.alive:
            for cell in np.ndindex(L, E):
                holder = int(world.servers[n].target_LE[cell])
                assert (n, holder) not in bad
                held = cell in world.servers[holder].held
                reads = world.servers[holder].read_LE[cell] and free_N[holder] > 0
                assert held or (reads and holder == n)
                found["read"] += not held
        found["bad"] += len(bad)
        replay(keeper, slots, allow_lost=False)
        finish(world, keeper, rng)
    assert found["bad"] > 2 and (found["read"] > 5 or sum(slots) > 17)


def let_act(world, keeper, rng) -> None:
    """Until all that was begun is done; nothing new begins."""
    for _ in range(2000):
        for n in world.alive:
            world.servers[n].act(rng)
            hear(world, keeper, n)
        if quiet(world) and not keeper.under_way:
            break
    assert quiet(world) and not keeper.under_way


def mend(world, keeper, rng) -> None:
    """Without new migrations, all that can have a slot has one, and someone reads the
    rest for each call."""
    let_act(world, keeper, rng)
    slots_N = world.slots_N * world.alive_N
    free_N = slots_N - keeper.held_NLE.sum(axis=(1, 2))
    for n in world.alive:
        for cell in np.ndindex(L, E):
            holder = int(world.servers[n].target_LE[cell])
            assert world.alive_N[holder]
            if cell not in world.servers[holder].held:
                assert cell in keeper.degraded and free_N[holder] > 0
                assert world.servers[n].read_LE[cell]
    if keeper.degraded:
        assert free_N.max() == 1


def test_changes_are_written_as_their_reader_wants_them(tmp_path):
    rng = np.random.default_rng(0)
    world, keeper = start(rng, (6, 6, 6), network=True)
    for step in range(400):
        world.servers[step % 3].act(rng)
        hear(world, keeper, step % 3)
        keeper.tick(busy=step < 300)
    lose(world, keeper, 1)
    mend(world, keeper, rng)
    path = tmp_path / "migrations_x.jsonl"
    write_migrations(path, keeper.table.changes)
    facts = ClusterFacts(
        methods=["x"],
        slots=[5, 5, 5],
        num_layers=L,
        num_experts=E,
        top_k=1,
        block_bytes=1,
    )
    read = read_migrations(path, facts)
    assert [c.version for c in read] == list(range(1, keeper.table.version + 1))
    assert {c.begun_s is None for c in read if c.moves} == {False}
    assert all(0 <= c.begun_s <= c.t_s for c in read if c.moves)
    assert all(len(c.sources) == len(c.moves) for c in read)

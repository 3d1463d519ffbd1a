"""Prism's servers and their scheduler, live in one process; requests and policies."""

import collections
import functools
import itertools
import math
import threading
from collections.abc import Callable, Sequence

import numpy as np

from moe_edge.cluster.drills import ACCUSE
from moe_edge.cluster.node.remote import last_deadline_s
from moe_edge.cluster.prism.method import MethodRun, PrismScheduler
from moe_edge.cluster.prism.server import Server, ServerOptions
from moe_edge.cluster.roles import FIRST, SCHEDULER
from moe_edge.cluster.scheduler.requests import ClusterRequest
from moe_edge.engine.generate import generate
from moe_edge.place.migrate import Decision
from moe_edge.place.migration_policy import Proposal
from moe_edge.place.plan import Placement
from tests.support.layered import StoreReader, resident_of
from tests.support.live_nodes import LiveNode, LiveNodes
from tests.support.tiny_models import ALL, BF16, random_prompts
from tests.support.tiny_servers import dense_weights, programs_of

BITS = ("gqa", BF16)
MOE_LAYERS = (1, 2)  # of that model
BLOCKS = 24
SLOTS = 25  # one copy and a spare slot: few sizes, few programs
READY_S = 60.0


class LiveServer(LiveNode):
    """A server and its thread."""

    def __init__(self, me: int, servers: int, options: ServerOptions):
        reader, weights = StoreReader(ALL[BITS[0]], dtype=BITS[1]), dense_weights(*BITS)
        programs = programs_of(*BITS)
        self.me = me
        super().__init__(
            FIRST + me,
            lambda transport: Server(
                me, servers, reader, weights, transport, options, programs
            ),
        )

    @property
    def server(self) -> Server:
        return self.node


class Audit:
    """Watches what servers hold, at every change: nothing may ever be nowhere.

    Attributes:
      wrong: what should not have been.
    """

    def __init__(self, servers: Sequence[LiveServer], slots: Sequence[int]):
        self._servers, self._slots, self.wrong = servers, slots, []
        self._lock = threading.RLock()
        self.watching = self.expect = False
        for one in servers:
            holdings = one.server.holdings
            set_cells = holdings._set

            def changed(cells, slot, set_cells=set_cells):
                with self._lock:
                    set_cells(cells, slot)
                    self._look()

            holdings._set = changed

    def begin(self) -> None:
        """Servers are ready: blocks are held from now on."""
        self.watching = self.expect

    def _look(self) -> None:
        held = [o.server.holdings.held_LE for o in self._servers if not o.killed]
        for one, slots in zip(self._servers, self._slots, strict=True):
            used = int(one.server.holdings.held_LE.sum())
            if used > slots:
                self.wrong.append(f"server {one.me} holds {used} in {slots} slots")
        if self.watching and held:
            lost = np.argwhere(~np.any(held, axis=0)[list(MOE_LAYERS)])
            if len(lost):
                self.wrong.append(f"nobody holds {lost[0].tolist()}")


class LiveScheduler(PrismScheduler):
    """Notes what it says and hears, and lets a test act then.

    Attributes:
      talk: (to or from, server, name, fields) in order.
      react: called with each of these.
    """

    def __init__(self, *args, **times_s):
        self.talk: list[tuple] = []
        self.react: Callable[..., None] = lambda *_: None
        self.on_strike: Callable[[int], None] = lambda _: None
        self.serving: Callable[[], None] = lambda: None
        super().__init__(*args, **times_s)

    def strike(self, drill):
        if drill.kind == ACCUSE:
            super().strike(drill)
        else:
            self.on_strike(drill.server)

    def tell(self, server, name, fields=None, arrays=None):
        super().tell(server, name, fields, arrays)
        more = {"known": arrays["known"].tolist()} if name == "request" else {}
        self._note("to", server, name, (fields or {}) | more)

    def next_event(self, until_s):
        event = super().next_event(until_s)
        if event is not None:
            self._note("from", *event[:3])
        return event

    def _note(self, way, server, name, fields):
        if name == "request":
            self.serving()
        self.talk.append((way, server, name, dict(fields)))
        self.react(way, server, name, fields)


class LiveCluster(LiveNodes):
    """Servers that hold a tiny model together.

    Args:
      slots: of each server.
      options: more of `ServerOptions`.

    Attributes:
      servers: by number.
    """

    def __init__(self, slots: Sequence[int], **options):
        super().__init__()
        config, options = ALL[BITS[0]], {"call_s": 3.0} | options
        self.servers = [
            LiveServer(me, len(slots), ServerOptions(n, **options))
            for me, n in enumerate(slots)
        ]
        times_s = {"hung_s": 2.0, "calls_s": last_deadline_s(options["call_s"])}
        self.scheduler = LiveScheduler(self.transport, None, config, slots, **times_s)
        self.scheduler.on_strike = self.kill
        self.audit = Audit(self.servers, slots)
        self.scheduler.serving = self.audit.begin
        self.start(self.servers)

    def run(self, held_NLE, asked: Sequence[ClusterRequest], **more) -> MethodRun:
        """Serves requests; every block is held at every instant, until a `kill`."""
        self.audit.watching = False  # while servers prepare
        self.audit.expect = not any(one.killed for one in self.servers)
        try:
            return self.scheduler.run_method(held_NLE, asked, ready_s=READY_S, **more)
        finally:
            self.audit.watching = False

    def kill(self, server: int) -> None:
        """Kills a server; from now on blocks may be lost."""
        self.audit.watching = self.audit.expect = False
        self.servers[server].kill()

    def kill_after(self, server: int, tokens: int) -> None:
        """Kills a server when its tokens are told; it tells no more than these."""
        node, killed = self.servers[server].server, threading.Event()
        told, heard = itertools.count(1), itertools.count(1)

        def new_token(*token):
            Server.new_token(node, *token)
            if next(told) == tokens:
                killed.wait(READY_S)

        def react(way, who, name, fields):
            is_one = (way, who, name) == ("from", server, "token")
            if is_one and next(heard) == tokens:
                self.kill(server)
                killed.set()

        node.new_token, self.scheduler.react = new_token, react

    def hold(self, one: ClusterRequest, said: dict[tuple[str, str], int]) -> None:
        """A request comes when all this has been said, so that no run ends before.

        Args:
          said: (to or from, name) -> how often.
        """
        left, inner = collections.Counter(said), self.scheduler.react
        one.arrival_s = math.inf

        def react(way, server, name, fields):
            inner(way, server, name, fields)
            left[way, name] -= 1
            if max(left[what] for what in said) <= 0:
                one.arrival_s = 0.0

        self.scheduler.react = react

    def traffic(self, sent: bool) -> dict[tuple[int, int, int], tuple[int, int]]:
        """(from, to, kind) -> messages and bytes of what servers asked each other."""
        found = {}
        for one in self.servers:
            counts = one.transport.traffic
            counts = counts.sent() if sent else counts.received()
            for (peer, kind), count in counts.items():
                if peer != SCHEDULER:
                    ends = (FIRST + one.me, peer) if sent else (peer, FIRST + one.me)
                    found[*ends, kind] = tuple(count)
        return found

    def check(self) -> None:
        assert not self.audit.wrong, self.audit.wrong[0]
        super().check()


def requests(
    lengths: Sequence[int], new: int, servers: int, at_s=0.0
) -> list[ClusterRequest]:
    """Random prompts, one after the other at the servers by turns."""
    prompts = random_prompts(ALL[BITS[0]], lengths)
    return [
        ClusterRequest(i, f"r{i}", i % servers, "prompts", at_s * i, tuple(prompt), new)
        for i, prompt in enumerate(prompts)
    ]


@functools.cache
def resident_run(prompt: tuple[int, ...], new: int):
    """What the resident engine gives for a prompt: tokens, and routing a token.

    Returns:
      (tokens, ids int32 [tokens, MoE layers, K], weights float32 likewise)
    """
    found = {layer: ([], []) for layer in MOE_LAYERS}

    def on_routing(layer, routing):
        ids_TK = np.asarray(routing.ids_TK)
        real_T = ids_TK[:, 0] < ALL[BITS[0]].moe.num_experts
        found[layer][0].append(ids_TK[real_T])
        found[layer][1].append(np.asarray(routing.weights_TK)[real_T])

    done = generate(resident_of(*BITS), [prompt], new, on_routing=on_routing)
    ids, weights = (
        np.stack([np.concatenate(found[layer][i]) for layer in MOE_LAYERS], axis=1)
        for i in range(2)
    )
    return done.tokens[0], ids, weights


def assert_tokens_of_one_machine(asked: Sequence[ClusterRequest]) -> None:
    """Gate A: what the resident engine gives each request alone."""
    for one in asked:
        assert one.done and one.error is None, one
        assert one.tokens == resident_run(one.prompt, one.max_new_tokens)[0], one.id


def random_held(servers: int, seed: int = 0, copies: float = 0.0) -> np.ndarray:
    """bool [N, L, E]: each block on a random server, some on more."""
    rng = np.random.default_rng(seed)
    shape = len(MOE_LAYERS), ALL[BITS[0]].moe.num_experts
    owner_LE = rng.integers(servers, size=shape)
    held_NLE = owner_LE == np.arange(servers)[:, None, None]
    return held_NLE | (rng.random(held_NLE.shape) < copies)


class OnNth:
    """Does something once: when the n-th of something is said or heard."""

    def __init__(self, way: str, name: str, count: int, act: Callable[[], None]):
        self.what, self.left, self.act = (way, name), count, act

    def __call__(self, way, server, name, fields):
        if (way, name) == self.what:
            self.left -= 1
            if self.left == 0:
                self.act()


class Wandering:
    """A migration policy that goes from one given table to the next, and around."""

    keep = 1.0

    def __init__(self, tables: Sequence[np.ndarray], period_s=0.01, source="host"):
        self._tables, self._turn = list(tables), 0
        self.period_s, self.source = period_s, source

    def propose(self, ledger, current, slots, cost_model, seconds_NM=None):
        self._turn += 1
        room_N = np.array([int(n.sum()) for n in slots])
        on_NLE = self._tables[self._turn % len(self._tables)].copy()
        on_NLE[room_N == 0] = False  # the lost
        on_NLE[room_N.argmax()] |= ~on_NLE.any(axis=0)
        return Proposal(
            Placement(np.where(on_NLE, 0, -1)),
            Decision(True, 0.0, 0.0, 0.0, 0),
            ledger.calls_NX.reshape(ledger.shape),
        )

"""The loop of the simulator for a cluster that was measured: `drive`, with software.

Messages, calls, the joining of a split layer and the head take their time here, and
servers have threads: one that runs their own layers and one that answers calls, in
order. A thread that has work takes the core of its machine that is free first, and the
longer the more servers have requests. There are thousands of events, not millions, so
nothing is written out by hand.
"""

from collections.abc import Sequence

from moe_edge.simulate.cluster.drive import CALLED, COMPUTED, END, LAYER, ROUTE
from moe_edge.simulate.cluster.links import CALL


class Threads:
    """Work of servers, on the cores of their machines.

    Args:
      loop: a `loop.ClusterLoop` whose cost model is a `MeasuredCosts`.
    """

    def __init__(self, loop):
        calibration = loop.cost_model.calibration
        self._links, self._first_gpu = loop.links, loop.first_gpu
        self._hosts = calibration.hosts
        self._core_free = [[0.0] * count for count in calibration.cores]
        self._answered_s = [0.0] * len(loop.servers)
        self._lanes = loop.schedule.lanes
        self._compute = _by_busy(calibration.compute_slowdown, len(loop.servers))
        self._message = _by_busy(calibration.message_slowdown, len(loop.servers))

    def _busy(self) -> int:
        """Servers that have requests now."""
        return sum(lane.stepping for lane in self._lanes)

    def message_slowdown(self) -> float:
        """How many times as long the software of messages takes now."""
        return self._message[self._busy()]

    def run(self, server: int, ready_s: float, seconds: float, name: str) -> float:
        """Queues work that waits for a core only: when it ends."""
        links, gpu = self._links, self._first_gpu[server]
        free_s = self._core_free[self._hosts[server]]
        core = free_s.index(min(free_s))
        start_s = max(ready_s, free_s[core])
        seconds *= self._compute[self._busy()]
        free_s[core] = end_s = start_s + seconds
        links.gpu_busy[gpu] += seconds
        links.gpu_free[gpu] = max(links.gpu_free[gpu], end_s)
        links.spans.add("gpu", gpu, name, start_s, seconds)
        return end_s

    def answer(self, server: int, ready_s: float, seconds: float) -> float:
        """Queues a call behind those that came before it: when it is answered."""
        ready_s = max(ready_s, self._answered_s[server])
        end_s = self._answered_s[server] = self.run(server, ready_s, seconds, "called")
        return end_s

    def send(self, server: int, other: int, ready_s: float, num_bytes: int) -> float:
        """Queues a message between two servers: when it is there."""
        links = self._links
        late_s = links.late_s[server * links.num_servers + other]
        more_s = (self.message_slowdown() - 1) * late_s
        return links.send(server, other, ready_s, num_bytes, CALL) + more_s


def _by_busy(times: Sequence[float], servers: int) -> list[float]:
    """Slowdown while 0, 1, .. all servers have requests."""
    return [times[min(max(busy, 1), len(times)) - 1] for busy in range(servers + 1)]


def drive_measured(loop) -> None:
    """Runs a `loop.ClusterLoop` until no event is left; events are those of `drive`.

    Raises:
      ConfigError: time ran backwards (a cost was negative or no number).
    """
    heap, steps = loop.heap, _Steps(loop)
    actions = {
        LAYER: steps.layer,
        ROUTE: steps.route,
        CALLED: steps.called,
        COMPUTED: steps.computed,
    }
    actions |= loop.handlers  # also ROUTE, where servers load blocks
    while heap:
        time_s, kind, where, item = heap.pop()
        loop.events += 1
        actions[kind](time_s, where, item)


class _Steps:
    """What happens to the step of a server."""

    def __init__(self, loop):
        self._loop, self._threads = loop, Threads(loop)
        self._num_layers = loop.pools.num_layers
        self._each_s = loop.cost_model.send_busy_s

    def layer(self, time_s: float, server: int, _: int) -> None:
        state = self._loop.servers[server]
        seconds = state.dense_s
        if self._loop.planned and state.calls.away[state.layer]:
            seconds += state.split_s
        end_s = self._threads.run(server, time_s, seconds, "dense")
        self._loop.heap.push(end_s, ROUTE, server)

    def route(self, time_s: float, server: int, _: int) -> None:
        """Calls leave one after another, then the server's own blocks begin."""
        loop, state = self._loop, self._loop.servers[server]
        calls, layer = state.calls, state.layer
        own_s, state.pending, state.sent_s = 0.0, 0, time_s
        each_s = self._each_s * self._threads.message_slowdown()
        for i in range(calls.offset[layer], calls.offset[layer + 1]):
            other = loop.server_of[calls.gpu[i]]
            if other == server:
                own_s += calls.seconds[i]
                continue
            state.pending += 1
            where = (server, other, time_s + state.pending * each_s, calls.there[i])
            loop.heap.push(self._threads.send(*where), CALLED, server, i)
        state.end_s = time_s + state.pending * each_s
        if own_s:
            state.end_s = self._threads.run(server, state.end_s, own_s, "experts")
        if not state.pending:
            self._next(server)

    def called(self, time_s: float, server: int, item: int) -> None:
        """The message of a call is there."""
        calls = self._loop.servers[server].calls
        other = self._loop.server_of[calls.gpu[item]]
        end_s = self._threads.answer(other, time_s, calls.seconds[item])
        self._loop.heap.push(end_s, COMPUTED, server, item)

    def computed(self, time_s: float, server: int, item: int) -> None:
        """A call is computed; its rows go back."""
        loop, state = self._loop, self._loop.servers[server]
        other = loop.server_of[state.calls.gpu[item]]
        back = (other, server, time_s, state.calls.back[item])
        end_s = self._threads.send(*back)
        if loop.on_call is not None:
            loop.on_call(server, item, end_s)
        state.end_s = max(state.end_s, end_s)
        state.pending -= 1
        if not state.pending:
            self._next(server)

    def _next(self, server: int) -> None:
        state = self._loop.servers[server]
        state.layer += 1
        if state.layer < self._num_layers:
            self._loop.heap.push(state.end_s, LAYER, server)
            return
        end_s = state.end_s
        if state.head_s:
            end_s = self._threads.run(server, end_s, state.head_s, "head")
        self._loop.heap.push(end_s, END, server)

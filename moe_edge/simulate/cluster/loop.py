"""The event-driven simulator of a cluster that serves one model together.

A server runs steps: one pass of its batch (prompts of new requests and one token of
each running one) through all layers. In each layer
  1. the dense part runs on the server's first GPU;
  2. then routing is known: calls of its own GPUs queue there, messages to other
     servers queue on their lines;
  3. a message that arrived queues its blocks on the GPU, then its results go back;
  4. when everything is there, the next layer begins.
Every GPU, line and host link serves one job at a time, in the order of readiness. An
event is the instant at which a job becomes ready, so a whole layer of a server is one
event a stage and not one a token. The head, sampling and the KV cache take no time.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.core.clock import EventHeap
from moe_edge.hardware.cost_model import CostModel
from moe_edge.place.plan import Placement
from moe_edge.simulate.cluster.calls import CallTable, GpuIndex, StepCalls, StepPlanner
from moe_edge.simulate.cluster.drive import ARRIVE, EXTRA, LAYER, drive
from moe_edge.simulate.cluster.lines import Lines
from moe_edge.simulate.cluster.pools import RoutingPools
from moe_edge.simulate.cluster.state import Ahead, LoopOptions, Running, ServerState
from moe_edge.simulate.cluster.timeline import Spans
from moe_edge.workload.requests import Request, check_requests

AHEAD = 64  # tokens of a lone request planned at a time


class ClusterLoop:
    """One run; `run` drives it to the end.

    Attributes:
      heap: the clock.
      lines: queues and what went through them.
      table: the targets of calls; changed by a migration.
      finish_R, first_R: float64 [R] seconds at which a request's last and first token
        were there; NaN before.
      counts_NX: int64 [N, L * E] pairs that each server asked for.
      windows: list of [N, 2] int64: local and all pairs of steps begun in a window.
      events: how many there were.
      version: of `table`; whoever changes it raises it.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        placement: Placement | None,
        cost_model: CostModel,
        pools: RoutingPools,
        options: LoopOptions,
        seed: int = 0,
    ):
        cluster = cost_model.cluster
        check_requests(requests, cluster.num_servers, tuple(pools.domains))
        self.requests, self.options = requests, options
        self.cost_model, self.pools = cost_model, pools
        self.heap, self.spans = EventHeap(), Spans(options.timeline_s)
        self.index = GpuIndex(cost_model)
        self.lines = Lines(cost_model, self.index, self.spans)
        self.planner = StepPlanner(self.index, pools.num_layers, pools.num_experts)
        self.table = None
        if placement is not None:
            self.table = self._table_of(placement)
        self.servers = [ServerState() for _ in range(cluster.num_servers)]
        self.rows = pools.rows(requests, seed)
        R, N = len(requests), cluster.num_servers
        self.finish_R, self.first_R = np.full(R, np.nan), np.full(R, np.nan)
        self.counts_NX = np.zeros((N, pools.num_blocks), np.int64)
        self.windows: list[np.ndarray] = []
        self.remote_blocks = self.steps = 0
        self.token_bytes = cost_model.block.token_bytes
        self.server_of = self.index.server_G.tolist()
        self.first_gpu = self.index.first_N.tolist()
        self.events = self.version = 0
        self._dense: list[dict[int, float]] = [{} for _ in self.servers]
        self._dense_of: dict = {}
        for n, server in enumerate(cluster.servers):  # equal machines share a table
            self._dense[n] = self._dense_of.setdefault(server.gpus[0].device, {})

    def _table_of(self, placement: Placement) -> CallTable:
        shape = (len(self.cost_model.cluster.servers), self.pools.num_layers)
        if placement.gpu_NLE.shape != (*shape, self.pools.num_experts):
            raise ConfigError(
                f"placement has shape {placement.gpu_NLE.shape}, the cluster and the "
                f"routing ask for {(*shape, self.pools.num_experts)}"
            )
        return CallTable(placement.gpu_NLE, self.cost_model, self.index)

    def run(self) -> None:
        """Serves all requests."""
        self.start()
        drive(self)

    def start(self) -> None:
        """Pushes the first events."""
        self._push_arrival(0)

    @property
    def unfinished(self) -> int:
        """Requests whose last token is not there yet."""
        return int(np.isnan(self.finish_R).sum())

    # --- requests and steps

    def arrive(self, time_s: float, server: int, number: int) -> None:
        """A request comes."""
        if number + 1 < len(self.requests):
            self._push_arrival(number + 1)
        self.admit(time_s, server, number)

    def _push_arrival(self, number: int) -> None:
        request = self.requests[number]
        self.heap.push(request.arrival_s, ARRIVE, request.server, number)

    def admit(self, time_s: float, server: int, number: int) -> None:
        """A request enters the queue of a server."""
        state = self.servers[server]
        request = self.requests[number]
        state.waiting.append(Running(number, int(self.rows[number]), request))
        if not state.running:
            self._begin_step(time_s, server)

    def _begin_step(self, time_s: float, server: int) -> None:
        state = self.servers[server]
        while state.waiting and len(state.running) < self.options.max_batch:
            state.running.append(state.waiting.popleft())
        if not state.running:
            return
        self.steps += 1
        state.layer = 0
        one = state.running[0]
        if self.table is not None and len(state.running) == 1 and not one.fresh:
            state.calls = self._next_token(server, one)
            state.dense_s = self._dense_s(server, 1)
            one.row += 1
            self.count_calls(time_s, server, state.calls)
        else:
            cells = self._batch(state)
            state.dense_s = self._dense_s(server, len(cells))
            self.plan_step(time_s, server, cells)
        self.heap.push(time_s, LAYER, server)

    def _batch(self, state: ServerState) -> np.ndarray:
        """int [T, L * K]: prompts of fresh requests, one token of the others."""
        parts = []
        for one in state.running:
            tokens = one.prompt if one.fresh else 1
            domain = self.requests[one.number].domain
            parts.append(self.pools.cells(domain, one.row, tokens))
            one.row += tokens
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _next_token(self, server: int, one: Running) -> StepCalls:
        """The calls of a lone request's next token, planned up to AHEAD at a time."""
        state = self.servers[server]
        known = state.ahead
        current = (one.number, self.version)
        if known is None or known[:2] != current or not known.steps:
            domain = self.requests[one.number].domain
            cells = self.pools.cells(domain, one.row, min(one.left, AHEAD))
            target_X = self.table.target_NX[server]
            steps = self.planner.plan_tokens(server, target_X, cells)
            known = state.ahead = Ahead(one.number, self.version, deque(steps))
        return known.steps.popleft()

    def plan_step(self, time_s: float, server: int, cells: np.ndarray) -> None:
        """Finds the calls of the step that begins now, and counts them."""
        calls = self.planner.plan(server, self.table.target_NX[server], cells)
        state = self.servers[server]
        state.calls, state.ahead = calls, None
        self.count_calls(time_s, server, calls)

    def count_calls(self, time_s: float, server: int, calls: StepCalls) -> None:
        """Takes note of the calls of a step that begins now."""
        self.counts_NX[server, calls.cells] += calls.counts
        self.remote_blocks += calls.remote_blocks
        self.count_pairs(time_s, server, calls.local_pairs, calls.remote_pairs)

    def count_pairs(self, time_s: float, server: int, local: int, remote: int) -> None:
        """Adds to the window of `time_s`."""
        window = int(time_s / self.options.window_s)
        while len(self.windows) <= window:
            self.windows.append(np.zeros((len(self.servers), 2), np.int64))
        self.windows[window][server] += (local, local + remote)

    def _end_step(self, time_s: float, server: int) -> None:
        state, still = self.servers[server], []
        for one in state.running:
            if one.fresh:
                self.first_R[one.number] = time_s
                one.fresh = False
            one.left -= 1
            if one.left:
                still.append(one)
            else:
                self.finish_R[one.number] = time_s
                self.finished(time_s, server, one.number)
        state.running = still
        self._begin_step(time_s, server)

    def finished(self, time_s: float, server: int, number: int) -> None:
        """A request's last token is there; subclasses may send it somewhere."""

    def _dense_s(self, server: int, tokens: int) -> float:
        table = self._dense[server]
        seconds = table.get(tokens)
        if seconds is None:
            seconds = table[tokens] = float(self.cost_model.dense_s(server, tokens))
        return seconds

    def arrived(self, time_s: float, server: int) -> None:
        """One of the parts that the layer of `server` waits for comes at `time_s`."""
        state = self.servers[server]
        if time_s > state.end_s:
            state.end_s = time_s
        state.pending -= 1
        if not state.pending:
            self.next_layer(server)

    def next_layer(self, server: int) -> None:
        """Everything of a layer is there: the next one, or the end of the step."""
        state = self.servers[server]
        state.layer += 1
        kind = LAYER if state.layer < self.pools.num_layers else EXTRA
        self.heap.push(state.end_s, kind, server, 0)

    def extra(self, time_s: float, server: int, item: int) -> None:
        """Item 0: a step ends. Subclasses number their own events from 1."""
        if item == 0:
            self._end_step(time_s, server)
        else:
            self.other(time_s, server, item)

    def other(self, time_s: float, server: int, item: int) -> None:
        """An event of a subclass."""
        raise ConfigError(f"event {item} of server {server} at {time_s} s is unknown")

    def route(self, time_s: float, server: int) -> None:
        """Routing is known, where calls were not planned ahead (`table` is None)."""
        raise ConfigError(f"server {server} has no placement to route by")

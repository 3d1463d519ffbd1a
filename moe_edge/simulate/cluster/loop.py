"""The event-driven simulator of a cluster that serves one model together.

A server runs steps: one pass of its batch (prompts of new requests and one token of
each running one) through all layers. In each layer
  1. the dense part runs on the server's first GPU;
  2. then routing is known: calls of its own GPUs queue there, messages to other
     servers queue on their links;
  3. a message that arrived queues its blocks on the GPU, then its results go back;
  4. when everything is there, the next layer begins.
Every GPU, network link and host link serves one job at a time, in the order of
readiness. An event is the instant at which a job becomes ready, so a whole layer of a
server is one event a stage and not one a token. The KV cache takes no time; the head,
sampling and all other software only in a measured cost model.

The order of requests is `schedule.loop`'s. Two parts may be added, together or alone:
`offload.HostMemory` (a server loads the blocks it lacks instead of asking others) and
`migration.Migration` (the placement follows what is asked).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from moe_edge.core.checks import (
    ConfigError,
    check_count,
    check_from_zero,
    check_positive,
)
from moe_edge.core.clock import EventHeap
from moe_edge.hardware.cost_model import CostModel
from moe_edge.place.migration_policy import MigrationPolicy
from moe_edge.place.plan import Placement
from moe_edge.schedule.continuous import Continuous
from moe_edge.schedule.loop import RequestLoop
from moe_edge.schedule.policy import Scheduler
from moe_edge.simulate.cluster.calls import CallTable, GpuIndex, StepCalls, StepPlanner
from moe_edge.simulate.cluster.drive import ADMIT, AGAIN, ARRIVE, END, LAYER, drive
from moe_edge.simulate.cluster.drive_measured import drive_measured
from moe_edge.simulate.cluster.links import PROMPT, Links
from moe_edge.simulate.cluster.migration import Migration
from moe_edge.simulate.cluster.offload import HostMemory, OffloadPolicy
from moe_edge.simulate.cluster.pools import RoutingPools
from moe_edge.simulate.cluster.running import Running, ServerState
from moe_edge.simulate.cluster.timeline import Spans
from moe_edge.workload.requests import Request, check_requests

TOKEN_ID_BYTES = 4


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """How servers batch and what is recorded.

    Attributes:
      max_batch: requests that a server runs at a time; 1 serves one after another, as
        Prism's basis (MoE-Infinity's generate) does.
      window_s: width of the windows of the local compute ratio.
      timeline_s: spans that begin before this are kept; 0 for none.
    """

    max_batch: int = 1
    window_s: float = 60.0
    timeline_s: float = 0.0

    def __post_init__(self):
        check_count("max_batch", self.max_batch)
        check_positive("window_s", self.window_s)
        check_from_zero("timeline_s", self.timeline_s)


class ClusterLoop:
    """One run; `run` drives it to the end.

    Args:
      requests: in order of arrival; pools: their routing.
      placement: where blocks are; None only where servers load every block.
      seed: of where requests read their routing.
      schedule: order of requests (its follow-ups are not simulated); None: `Continuous`
        with the options' max_batch.
      migration: when the placement changes; None: never.
      offload: how servers load what they lack; None: they ask the others.

    Attributes:
      heap: the clock; handlers: of its events, by kind.
      schedule: queues and running requests of the servers.
      links: queues of GPUs, links and host links, and what went through them.
      table: the targets of calls; changed by a migration.
      finish_R, first_R: float64 [R] seconds at which a request's last and first token
        were there; NaN before.
      counts_NX: int64 [N, L * E] pairs that each server asked for.
      windows: list of [N, 2] int64: local and all pairs of steps begun in a window.
      on_call: told (server, call, end_s) of each call to another server; None: nobody.
      passed_on: requests that were served by another server than they came to.
      events, steps: how many there were.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        placement: Placement | None,
        cost_model: CostModel,
        pools: RoutingPools,
        options: LoopOptions,
        seed: int = 0,
        *,
        schedule: Scheduler | None = None,
        migration: MigrationPolicy | None = None,
        offload: OffloadPolicy | None = None,
    ):
        R, N = len(requests), cost_model.cluster.num_servers
        check_requests(requests, N, tuple(pools.domains))
        self.requests, self.options = requests, options
        self.cost_model, self.pools = cost_model, pools
        self.heap, self.spans = EventHeap(), Spans(options.timeline_s)
        self.index = GpuIndex(cost_model)
        self.links = Links(cost_model, self.index, self.spans)
        self.schedule = RequestLoop(schedule or Continuous(options.max_batch), N)
        self.servers = [ServerState() for _ in range(N)]
        self.rows = pools.rows(requests, seed)
        self.finish_R, self.first_R = np.full(R, np.nan), np.full(R, np.nan)
        self.counts_NX = np.zeros((N, pools.num_blocks), np.int64)
        self.windows: list[np.ndarray] = []
        self.remote_blocks = self.steps = self.events = self.passed_on = 0
        self.on_call: Callable[[int, int, float], None] | None = None
        self.block_bytes = cost_model.block.num_bytes
        self.server_of = self.index.server_G.tolist()
        self.first_gpu = self.index.first_N.tolist()
        self._planner = StepPlanner(self.index, pools, cost_model)
        self.table = None
        if placement is not None:
            shape = (N, pools.num_layers, pools.num_experts)
            if placement.gpu_NLE.shape != shape:
                raise ConfigError(
                    f"placement has shape {placement.gpu_NLE.shape}, the cluster and "
                    f"the routing ask for {shape}"
                )
            self.table = CallTable(placement.gpu_NLE, cost_model, self.index)
        self._dense_s = functools.cache(cost_model.dense_s)
        self.handlers = {
            ARRIVE: self._arrive,
            ADMIT: self._admit,
            AGAIN: self._ask_again,
            END: self._end_step,
        }
        self.memory = self.migration = None
        if offload is not None:
            self.memory = HostMemory(self, offload)
        elif placement is None:
            raise ConfigError("a cluster that loads no blocks needs a placement")
        if migration is not None:
            self.migration = Migration(self, migration, placement)

    @property
    def planned(self) -> bool:
        """Whether the calls of a step are known when it begins."""
        return self.memory is None

    def run(self) -> None:
        """Serves all requests."""
        self._push_arrival(0)
        if self.migration is not None:
            self.migration.start()
        (drive_measured if self.cost_model.has_software else drive)(self)

    @property
    def unfinished(self) -> int:
        """Requests whose last token is not there yet."""
        return int(np.isnan(self.finish_R).sum())

    @property
    def parts(self) -> list[Migration | HostMemory]:
        """What was added to this run."""
        return [part for part in (self.migration, self.memory) if part is not None]

    # --- requests

    def _push_arrival(self, number: int) -> None:
        request = self.requests[number]
        self.heap.push(request.arrival_s, ARRIVE, request.server, number)

    def _arrive(self, time_s: float, server: int, number: int) -> None:
        """A request comes, and perhaps goes to another server."""
        if number + 1 < len(self.requests):
            self._push_arrival(number + 1)
        request = self.requests[number]
        job = Running(request, int(self.rows[number]))
        target = self.schedule.arrive(job, time_s)
        if target == server:
            self._admit(time_s, server, number)
            return
        self.passed_on += 1
        num_bytes = TOKEN_ID_BYTES * request.input_tokens
        there_s = self.links.send(server, target, time_s, num_bytes, PROMPT)
        self.heap.push(there_s, ADMIT, target, number)

    def _admit(self, time_s: float, server: int, number: int) -> None:
        """A request enters the queue of a server."""
        if self.schedule.admit(self.schedule.open[number], server, time_s):
            self._begin_step(time_s, server)

    def _ask_again(self, time_s: float, server: int, number: int) -> None:
        """The policy wanted to wait until now."""
        if not self.schedule.lanes[server].stepping:
            self._begin_step(time_s, server)

    # --- steps

    def _admitted(self, time_s: float, server: int) -> Sequence[Running]:
        """The requests of a server's next step; if none, it may be asked again."""
        running = self.schedule.begin_step(server, time_s)
        self.steps += bool(running)
        again_s = self.schedule.lanes[server].again_s
        if not running and again_s is not None:
            self.heap.push(again_s, AGAIN, server)
        return running

    def _begin_step(self, time_s: float, server: int) -> None:
        running = self._admitted(time_s, server)
        if not running:
            return
        one, tokens = running[0], 1
        if self.planned and len(running) == 1 and not one.fresh:
            domain = self.requests[one.id].domain
            calls = self._planner.next_token(
                server, self.table, one.id, domain, one.row, one.left
            )
            one.row += 1
        else:
            cells = self._batch(running)
            tokens = len(cells)
            if self.planned:
                calls = self._planner.plan(server, self.table.target_NX[server], cells)
            else:
                fresh = any(one.fresh for one in running)
                calls = self.memory.begin(server, cells, fresh)
        self._enter(time_s, server, calls, tokens)

    def _enter(self, time_s: float, server: int, calls: StepCalls, tokens: int) -> None:
        """A pass through all layers begins."""
        state, costs = self.servers[server], self.cost_model
        state.layer = 0
        state.calls, state.dense_s = calls, float(self._dense_s(server, tokens))
        if costs.has_software:
            state.split_s = costs.split_s(server, costs.stage(tokens))
            state.head_s = costs.head_s(server, tokens)
        self._count(time_s, server, calls)
        self.heap.push(time_s, LAYER, server)

    def _batch(self, running: Sequence[Running]) -> np.ndarray:
        """int [T, L * K]: prompts of fresh requests, one token of the others."""
        parts = []
        for one in running:
            request = self.requests[one.id]
            tokens = request.input_tokens if one.fresh else 1
            parts.append(self.pools.cells(request.domain, one.row, tokens))
            one.row += tokens
        return np.concatenate(parts)

    def _count(self, time_s: float, server: int, calls: StepCalls) -> None:
        """Takes note of what a step that begins now asks for."""
        self.remote_blocks += calls.remote_blocks
        self.counts_NX[server, calls.cells] += calls.counts
        if self.migration is not None:
            self.migration.count(server, calls.cells, calls.counts)
        window = int(time_s / self.options.window_s)
        while len(self.windows) <= window:
            self.windows.append(np.zeros((len(self.servers), 2), np.int64))
        all_pairs = calls.local_pairs + calls.remote_pairs
        self.windows[window][server] += (calls.local_pairs, all_pairs)

    def _end_step(self, time_s: float, server: int, _: int) -> None:
        running = self.schedule.lanes[server].running
        done = [one for one in running if self._new_token(time_s, server, one)]
        self.schedule.end_step(server, time_s, done)
        self._begin_step(time_s, server)

    def _new_token(self, time_s: float, server: int, one: Running) -> bool:
        """A token of a request is there; whether it was the last."""
        if one.fresh:
            self.first_R[one.id] = time_s
            one.fresh = False
        one.left -= 1
        if not one.left:
            self.finish_R[one.id] = self._answered(time_s, server, one)
        return not one.left

    def _answered(self, time_s: float, server: int, one: Running) -> float:
        """When the answer is there; of a request that was passed on, it goes back."""
        if one.home == server:
            return time_s
        num_bytes = TOKEN_ID_BYTES * self.requests[one.id].output_tokens
        return self.links.send(server, one.home, time_s, num_bytes, PROMPT)

"""A run of real servers, in computed time: its requests, routing and placements.

The clock is the only thing that is not taken from the run: what takes how long is what
its method's calibration says. Migrations happen when they did; what they send is
counted, but holds nothing up, as blocks wait for calls in a real run.
"""

import dataclasses

import numpy as np

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.core.events import Event
from moe_edge.hardware.measured_costs import MeasuredCosts
from moe_edge.place.plan import Placement
from moe_edge.simulate.cluster.drive import PERIOD
from moe_edge.simulate.cluster.links import MIGRATE
from moe_edge.simulate.cluster.loop import LoopOptions
from moe_edge.simulate.cluster.pools import RoutingPools
from moe_edge.simulate.cluster.report import ClusterResult
from moe_edge.simulate.cluster.turns import TurnLoop
from moe_edge.workload.cluster_run import FROM_CHECKPOINT, TableChange, locality
from moe_edge.workload.cluster_run_reader import ClusterRun, MethodRun


class RecordedRouting(RoutingPools):
    """Every request reads its own rows, from the first to the last."""

    def __init__(self, run: MethodRun, num_experts: int):
        super().__init__({"": run.ids_TLK}, num_experts)
        self._first_R = run.first_R
        names = {request.domain for request in run.requests}
        self._cells = dict.fromkeys(names, self._cells[""])
        self.domains = tuple(names)

    def rows(self, requests, seed: int) -> np.ndarray:
        return self._first_R


class Timetable:
    """Changes of a loop's table, at the times at which they were made."""

    def __init__(self, loop: TurnLoop, changes: list[TableChange], num_experts: int):
        self._loop, self._changes, self._num_experts = loop, changes, num_experts
        loop.handlers[PERIOD] = self._change
        for number, change in enumerate(changes):
            loop.heap.push(change.t_s, PERIOD, 0, number)

    def _change(self, time_s: float, _: int, number: int) -> None:
        loop, change = self._loop, self._changes[number]
        table, blocks = loop.table, []
        for copies, arrives in ((change.moves, True), (change.drops, False)):
            for server, layer, expert in copies:
                block = layer * self._num_experts + expert
                table.gpu_NX[server, block] = loop.first_gpu[server] if arrives else -1
                blocks.append(block)
        for (server, *_), source in zip(change.moves, change.sources, strict=False):
            if source not in (FROM_CHECKPOINT, server):
                pair = source * len(loop.servers) + server
                loop.links.sent[MIGRATE][pair] += loop.block_bytes
        if blocks:
            try:
                table.update(np.unique(blocks))
            except CapacityError as error:
                raise ConfigError(f"version {change.version}: {error}") from error


class Recorded:
    """One method of a run, ready to be simulated.

    Attributes:
      run: its files.
      loop: of its requests.
    Raises:
      ConfigError: files that do not belong together; OSError: one cannot be read.
    """

    def __init__(self, cluster: ClusterRun, method: str, options: LoopOptions):
        facts = cluster.facts
        self.run = cluster.method(method)
        self._chunk_tokens = facts.chunk_tokens
        shape = (facts.num_servers, facts.num_layers, facts.num_experts)
        placement = Placement.load(self.run.placement)
        if placement.gpu_NLE.shape != shape:
            raise ConfigError(
                f"{self.run.placement}.npy has shape {placement.gpu_NLE.shape}, the "
                f"run has (servers, layers, experts) {shape}"
            )
        costs = MeasuredCosts.of(self.run.calibration, facts.slots, facts.block_bytes)
        placement.check(costs.cluster.slots(facts.block_bytes))
        self.loop = TurnLoop(
            *(self.run.requests, placement, costs),
            RecordedRouting(self.run, facts.num_experts),
            dataclasses.replace(options, max_batch=facts.max_batch),
            chunk_tokens=facts.chunk_tokens,
        )
        Timetable(self.loop, self.run.changes, facts.num_experts)

    def simulate(self) -> ClusterResult:
        """Runs it to the end."""
        self.loop.run()
        return ClusterResult(self.loop)

    def row(self, result: ClusterResult) -> dict:
        """The keys of a real run that a simulated one has, and what was measured."""
        sent, loop = self.run.calibration.messages, self.loop
        served, calls = self.run.served, loop.calls_done
        payload = int(result.bytes_NN["call"].sum())
        remote_pairs = result.pairs - result.local_pairs
        headers = sent.call_bytes * len(calls) + sent.pair_bytes * remote_pairs
        overhead_s = [c.end_s - c.sent_s - c.compute_s for c in calls if c.decode]
        tokens = sum(request.output_tokens for request in self.run.requests)
        measured_s = float(np.mean([one.latency_s for one in served]))
        there = locality(self.run.trace, self._chunk_tokens)
        return {
            "latency_s_N": result.latency_s_N,
            "mean_latency_s": result.mean_latency_s,
            "p95_latency_s": float(np.quantile(result.latency_R, 0.95)),
            "local_ratio": result.local_ratio,
            "remote_calls": result.remote_calls,
            "tokens_per_s": tokens / float(loop.finish_R.max()),
            "payload_bytes": payload,
            "activation_bytes": payload - headers,
            "call_overhead_s": float(np.median(overhead_s)) if overhead_s else None,
            "moved_blocks": sum(len(change.moves) for change in self.run.changes),
            "measured_latency_s": measured_s,
            "error_pct": 100 * (result.mean_latency_s / measured_s - 1),
            "measured_local_ratio": there.local_ratio,
            "measured_remote_calls": there.remote_calls,
        }

    def events(self) -> list[Event]:
        """Calls and migrated blocks, as a real run records them."""
        found = [
            Event(
                t_s=call.sent_s,
                dur_s=call.end_s - call.sent_s,
                kind="call",
                request=call.request,
                layer=call.layer,
                server=call.server,
                bytes=call.num_bytes,
            )
            for call in self.loop.calls_done
        ]
        for change in self.run.changes:
            begun_s = change.t_s if change.begun_s is None else change.begun_s
            for server, layer, expert in change.moves:
                where = {"layer": layer, "expert": expert, "server": server}
                took_s = change.t_s - begun_s
                found.append(Event(begun_s, took_s, "transfer", "migrate", **where))
        return found

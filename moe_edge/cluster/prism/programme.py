"""What the scheduler does in a run of Prism: warm up, learn what is asked, serve."""

import dataclasses
import functools
import time
from pathlib import Path

import numpy as np

from moe_edge.cluster.node.membership import Reception
from moe_edge.cluster.node.remote import last_deadline_s
from moe_edge.cluster.prism.calibrate import calibration_of
from moe_edge.cluster.prism.method import MethodRun, PrismScheduler
from moe_edge.cluster.prism.model_checks import given_placement
from moe_edge.cluster.prism.outcome import (
    alone_row,
    summary_row,
    token_events,
    told,
    write_method,
    write_served,
)
from moe_edge.cluster.prism_options import PrismOptions
from moe_edge.cluster.scheduler.programme import Programme
from moe_edge.cluster.scheduler.serving import ServingResult
from moe_edge.cluster.scheduler.wanted import Wanted, from_workload
from moe_edge.cluster.slots import room_of, slots_of
from moe_edge.cluster.transport.messages.transport import Transport
from moe_edge.core.checks import ConfigError
from moe_edge.engine.session import PREFILL_CHUNK
from moe_edge.engine.sizes import bucket
from moe_edge.hardware.cluster_calibration import CALIBRATION_FILE
from moe_edge.hardware.cost_model import BlockShape, CostModel
from moe_edge.hardware.presets import lan
from moe_edge.hardware.specs import Cluster, Device, Gpu, Link, Server
from moe_edge.model.quantised import bytes_per_weight
from moe_edge.place.migration_policy import MigrationPolicy
from moe_edge.place.placer import ALONE, get_placer
from moe_edge.place.plan import Placement
from moe_edge.place.problem import Traffic
from moe_edge.workload.cluster_run import ClusterFacts, method_file

LOOPBACK_MBPS = 8000.0  # of processes on one machine, for placers that ask
PAYLOAD = 1448 / 1514  # of a full packet
HOST_BYTES_PER_S = 1e9  # of a block from the checkpoint, until it is measured


class PrismProgramme(Programme):
    """One run of the cluster.

    Attributes:
      scheduler: talks to servers.
    """

    options: PrismOptions

    def __init__(
        self,
        options: PrismOptions,
        transport: Transport,
        reception: Reception,
        folder: Path,
    ):
        super().__init__(options, folder)
        config = self.config
        blocks = len(config.moe_layers) * config.moe.num_experts
        self._slots_N = np.array(slots_of(options, blocks))
        self._room_N = room_of(options, blocks)
        self.scheduler = PrismScheduler(
            *(transport, reception, config, self._slots_N),
            hung_s=options.hung_s,
            calls_s=last_deadline_s(options.call_s),  # as long as a caller waits
        )

    def run(self, members: dict[int, dict]) -> None:
        """Serves by every method and writes all files."""
        options = self.options
        warm_s = self._warm_up()
        ready_at = time.time()
        print(f"compiled in {warm_s:.1f} s; serving {len(self.fresh())} requests")
        frequency_NLE = None
        if not ALONE.keys() >= set(options.method_names):
            frequency_NLE = self._frequencies()
        traffic, costs = self._traffic(), self._cost_model()
        rows, runs = {}, {}
        for name in options.method_names:
            if name in ALONE:
                runs[name], rows[name] = self._run_alone(name)
            else:
                policy, held_NLE = self._placement(name, frequency_NLE, costs, traffic)
                given = {"policy": policy, "cost_model": costs}
                runs[name], rows[name] = self._run_placed(name, held_NLE, **given)
            print(told(name, rows[name]))
        self.write_texts(next(iter(runs.values())).asked)
        placed = {n: run for n, run in runs.items() if isinstance(run, MethodRun)}
        notes = [facts for run in runs.values() for facts, _ in run.notes.values()]
        failures = [each for run in runs.values() for each in run.failures]
        more = {
            "mode": options.mode,
            "options": dataclasses.asdict(options),
            "rows": rows,
            "failures": [dataclasses.asdict(failure) for failure in failures],
            "bad_pairs": self.scheduler.accusations.found_bad,
            "lost_requests": sum(
                not one.done for run in runs.values() for one in run.asked
            ),
            "degraded": sum(len(run.keeper.degraded) for run in placed.values()),
            "compiled_after_warmup": sum(facts["compiled"] for facts in notes),
            "same_tokens": self._same_tokens(runs),
            "warm_up_s": warm_s,
            "ready_at": ready_at,  # by the clock on the wall
            "processors": sorted({fields["processor"] for fields in members.values()}),
            "server_slots": self._slots_N.tolist(),
        }
        self._facts().save(self.folder, more)
        if placed:
            self._calibrate(placed)

    def _run_placed(self, name: str, held_NLE: np.ndarray, **given):
        """A method that places blocks: its run and row; writes its files."""
        moe, drill = self.config.moe, self.options.drill_of(name)
        run = self.scheduler.run_method(held_NLE, self.fresh(), drill=drill, **given)
        write_method(self.folder, name, run, moe.num_experts, moe.top_k)
        return run, summary_row(run, self.config.d_model)

    def _run_alone(self, name: str):
        """The same of servers that ask nobody."""
        given = {"passes_on": ALONE[name], "drill": self.options.drill_of(name)}
        run = self.scheduler.run_alone(self.fresh(), **given)
        write_served(self.folder, name, run, token_events(run))
        return run, alone_row(run, self.options.servers)

    def _calibrate(self, runs: dict[str, MethodRun]) -> None:
        """Writes what all and each cost, where servers were there long enough."""
        options = self.options
        mbps = options.link_mbps or LOOPBACK_MBPS
        link = f"{mbps:g} Mbit/s" if options.link_mbps else "loopback"
        calibrate = functools.partial(
            calibration_of,
            d_model=self.config.d_model,
            chunk_tokens=PREFILL_CHUNK,
            bucket=bucket,
            line_bytes_per_s=mbps * 1e6 / 8 * PAYLOAD,
            source=f"this run's servers on one machine's cores, {link}",
        )
        whole = {name: run for name, run in runs.items() if not run.failures}
        if not whole:
            print("no calibration: a server was lost in every method's run")
            return
        of = {CALIBRATION_FILE: list(whole.values())}
        of |= {method_file("calibration", name): [run] for name, run in whole.items()}
        for file, some in of.items():
            try:
                calibrate(some).save(self.folder, file)
            except ConfigError as error:
                print(f"no calibration ({file}): {error}")

    def _facts(self) -> ClusterFacts:
        options, config = self.options, self.config
        return ClusterFacts(
            methods=options.method_names,
            slots=self._room_N,
            num_layers=len(config.moe_layers),
            num_experts=config.moe.num_experts,
            top_k=config.moe.top_k,
            block_bytes=self.block_bytes,
            max_batch=options.max_batch,
        )

    def _warm_up(self) -> float:
        sizes = {(len(one.prompt), one.max_new_tokens) for one in self.wanted.asked}
        if self.options.prompts is None:
            sizes |= {(len(one.prompt), 2) for one in self._sample.asked}
        alone = {"alone": self.options.host_bytes_per_s}
        return self.warm_up(alone if self.options.serves_alone else {}, sizes=sizes)

    @functools.cached_property
    def _sample(self) -> Wanted:
        """Other texts of the same families, for what placers are told first."""
        where = self.options, self.tokenizer, self.config.max_positions
        return from_workload(*where, purpose="sample", interval_s=0.0)

    def _frequencies(self) -> np.ndarray:
        """float64 [N, L, E]: uniform, or counted on other texts of each server."""
        config, options = self.config, self.options
        layers, E = len(config.moe_layers), config.moe.num_experts
        uniform_NLE = np.full((options.servers, layers, E), 1 / E)
        if options.prompts is not None:
            return uniform_NLE
        held_NLE = self._place("optimal", uniform_NLE).on_NLE
        self.scheduler.run_method(held_NLE, self._sample.asked)
        counts_NLE = np.ones(uniform_NLE.shape)  # so that nothing is impossible
        for server in self.scheduler.alive:
            answer = self.scheduler.ask(server, "counts")
            if answer is not None:
                counts_NLE[server] += answer[1]["pairs_LE"][list(config.moe_layers)]
        return counts_NLE / counts_NLE.sum(axis=-1, keepdims=True)

    def _place(self, name: str, frequency_NLE, costs=None, traffic=None) -> Placement:
        room = [np.array([n]) for n in self._room_N]
        context = {} if traffic is None else {"traffic": traffic}
        placer = self.options.placer(name)
        costs = costs or self._cost_model()
        return placer.place(
            frequency_NLE, room, costs, seed=self.options.seed, **context
        )

    def _placement(self, name: str, frequency_NLE, costs, traffic):
        """(what changes the placement, bool [N, L, E] what servers hold at first)."""
        options = self.options
        if options.placement is not None:
            placement, _ = given_placement(options, self.config)
            placer = get_placer("optimal")
        else:
            placement = self._place(name, frequency_NLE, costs, traffic)
            placer = options.placer(name)
        policy = None
        if options.period_s:
            policy = MigrationPolicy(
                period_s=options.period_s,
                keep=options.keep,
                source=options.source,
                hysteresis=options.hysteresis,
                placer=placer,
                traffic=traffic,
            )
        return policy, placement.on_NLE

    def _traffic(self) -> Traffic:
        asked = self.wanted.asked
        return Traffic(
            self.config.moe.top_k,
            float(np.mean([len(one.prompt) for one in asked])),
            float(np.mean([one.max_new_tokens for one in asked])),
        )

    def _cost_model(self) -> CostModel:
        """What placers and migration think that things cost here."""
        config, options, reader = self.config, self.options, self.reader
        kind = reader.layout.kind
        shape = BlockShape(
            config.d_model,
            config.moe.expert_dim,
            reader.layout.value_dtype(reader.dtype).itemsize,
            bytes_per_weight=bytes_per_weight(kind),
        )
        memory = int(self._slots_N.max() + 1) * shape.num_bytes
        device = Device(
            name="server",
            memory_bytes=memory,
            flops_per_s=2e10,
            memory_bytes_per_s=5e9,
            source="assumed: a core or two of a server",
        )
        link = Link(bytes_per_s=HOST_BYTES_PER_S, source="assumed")
        servers = tuple(
            Server(
                name=f"server{n + 1}",
                gpus=(Gpu(device=device, host_link=link),),
            )
            for n in range(options.servers)
        )
        network = lan(options.link_mbps or LOOPBACK_MBPS)
        return CostModel(Cluster(servers=servers, network=network), shape)

    def _same_tokens(self, runs: dict[str, ServingResult]) -> bool:
        """Whether methods give the first one's tokens: they change where, not what,
        but by a lossy route, which takes what is where."""
        (first, reference), *others = runs.items()
        same = True
        for name, run in others:
            both = zip(run.asked, reference.asked, strict=True)
            done = [(a, b) for a, b in both if a.done and b.done]
            if other := [a.name for a, b in done if a.tokens != b.tokens]:
                same = False
                names = ", ".join(other)
                print(f"warning: {name} gave other tokens than {first} for {names}")
        return same

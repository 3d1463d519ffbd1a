"""Plans of several servers: placements by place/, times by the simulator.

Nothing is measured. Every server has so many requests at once as rows decode together;
a placement is simulated with several draws of routing, which make the ranges.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.core.progress import counter
from moe_edge.engine.devices import SPARE_SHARE
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.hardware import presets
from moe_edge.hardware.models import ModelShape
from moe_edge.hardware.specs import Cluster, Gpu, Server
from moe_edge.place.placer import fit_placers
from moe_edge.place.plan import Placement
from moe_edge.place.problem import Problem, Traffic
from moe_edge.planner.asked import check_context, given_trace
from moe_edge.planner.candidates import Candidate, Placed
from moe_edge.planner.choose import Judged, judge, ranked
from moe_edge.planner.described import Described, DescribedModel
from moe_edge.planner.estimate import Estimate, exactly
from moe_edge.planner.options import AUTO, PlanOptions
from moe_edge.planner.quality import Quality, Refused, admitted, unmeasured
from moe_edge.planner.replayed import Recorded, layer_slots
from moe_edge.planner.search import Found
from moe_edge.planner.summary import Plan, summed_up
from moe_edge.simulate.cluster.loop import ClusterLoop, LoopOptions
from moe_edge.simulate.cluster.pools import RoutingPools
from moe_edge.workload.requests import fixed_requests
from moe_edge.workload.routing_model import BIGBENCH, RoutingModel

DRAWS = 5  # of routing, for each placement
POOL_TOKENS = 4096  # of each domain
SPARE = 1  # slots of a server that no placement uses (`PrismOptions.slots`)


class Fleet(NamedTuple):
    """The machines of a cluster: names and GPUs of each server, and the model there."""

    names: Sequence[str]
    gpus: Sequence[Sequence[Gpu]]
    model: DescribedModel


def check_servers(
    asked: PlanOptions, base: OffloadOptions, fixed: frozenset[str]
) -> Fleet:
    """What a plan would refuse before it computes.

    Raises:
      ConfigError: unknown machines, or options of one engine.
      CapacityError: the servers hold less than one copy of the experts.
    """
    if fixed:
        raise ConfigError(
            f"offload.{sorted(fixed)[0]} is of one engine, and --servers hold what a "
            "placement says; leave it out"
        )
    names = _names(asked)
    gpus = [[presets.gpu(name) for name in each.split("+")] for each in names]
    fleet = Fleet(names, gpus, DescribedModel(asked))
    check_context(asked, fleet.model.config)
    _Case(asked, base, fleet, Quality(), None)
    return fleet


def _names(asked: PlanOptions) -> list[str]:
    text, machine = str(asked.servers).strip(), asked.machine
    if not (text.isascii() and text.isdigit()):
        if machine is not None:
            raise ConfigError(
                f"--servers {text} names machines, and --machine is {machine}; leave "
                "--machine out, or give a number of servers"
            )
        names = [name.strip() for name in text.split(",")]
        if "" in names:
            raise ConfigError(
                f"--servers is {text!r}, which has an empty name; give a machine a "
                "server, separated by commas (rtx_4090,rtx_3090+rtx_3090)"
            )
        return names
    if machine is None:
        raise ConfigError(
            f"--servers {text} are of what --machine names; give it (rtx_4090, or a "
            "machine.json of moe-edge profile_machine)"
        )
    if not 0 < int(text) <= 64:
        raise ConfigError(f"--servers is {text}, expected 1 to 64")
    return [machine] * int(text)


class _Case:
    """The model in a format on the servers: what fits, what is asked, what is drawn."""

    def __init__(
        self,
        asked: PlanOptions,
        base: OffloadOptions,
        fleet: Fleet,
        quality: Quality,
        trace: Recorded | None,
    ):
        self._asked, self._trace, kind = asked, trace, quality.expert_dtype
        described = partial(fleet.model, kind=kind)
        first = described(fleet.gpus[0][0])
        size = first.dense_dtype.itemsize
        self.shape = ModelShape.of(first.config, "the model", "its config", size)
        held_N, self.slots_N, servers = [], [], []
        for name, gpus in zip(fleet.names, fleet.gpus, strict=True):
            held = [_slots(base, asked, described(gpu), gpu) for gpu in gpus]
            self.slots_N.append(sum(slots for slots, _ in held))
            held_N.append(sum(num_bytes for _, num_bytes in held))
            free = [slots - SPARE * (not n) for n, (slots, _) in enumerate(held)]
            servers.append(Server(name=name, gpus=self._holding(gpus, free)))
        self.device_bytes = max(held_N)
        network = presets.lan(float(asked.network or 0))
        cluster = Cluster(servers=tuple(servers), network=network, sharing="egress")
        try:
            self.costs = self.shape.costs(cluster)
        except CapacityError as error:
            reason = str(error).rpartition("; ")[0]
            remedy = "raise --device_memory, of each GPU, or name more --servers"
            raise CapacityError(f"{reason}; {remedy}") from error
        self.domains = [BIGBENCH[n % len(BIGBENCH)] for n in range(len(servers))]

    def _holding(self, gpus: Sequence[Gpu], slots: Sequence[int]) -> tuple[Gpu, ...]:
        block_bytes = self.shape.block.num_bytes
        return tuple(
            dataclasses.replace(gpu, expert_memory_bytes=int(max(n, 0) * block_bytes))
            for gpu, n in zip(gpus, slots, strict=True)
        )

    def pools(self, seed: int) -> RoutingPools:
        if self._trace is not None:
            return RoutingPools.recorded(self._trace.trace, self.domains)
        routing = RoutingModel.like(self.shape)
        return RoutingPools.sampled(routing, self.domains, seed, POOL_TOKENS)

    def problem(self) -> Problem:
        """What placers are told: what each server's own texts ask for."""
        pools, asked = self.pools(self._asked.seed), self._asked
        frequency_NLE = np.stack([pools.frequency(each) for each in self.domains])
        slots = self.costs.cluster.slots(self.shape.block.num_bytes)
        lengths = float(asked.prompt_tokens), float(asked.new_tokens)
        return Problem(
            frequency_NLE / len(self.domains),
            slots,
            self.costs,
            seed=asked.seed,
            traffic=Traffic(self.shape.top_k, *lengths),
        )

    def estimate(self, placement: Placement, quality: Quality) -> Estimate:
        """Simulates the placement."""
        asked, N = self._asked, len(self.domains)
        options = LoopOptions(max_batch=asked.batch)
        at_once = [np.zeros(asked.batch)] * N
        lengths = asked.prompt_tokens, asked.new_tokens
        requests = fixed_requests(self.domains, at_once, *lengths)
        tpot_s, ttft_s, local = [], [], []
        for draw in range(1, 1 + DRAWS):  # 0 told the placers
            seed = asked.seed + draw
            given = requests, placement, self.costs, self.pools(seed), options, seed
            loop = ClusterLoop(*given)
            loop.run()
            steps = asked.new_tokens - 1
            tpot_s.append(float((loop.finish_R - loop.first_R).mean() / steps))
            ttft_s.append(float(loop.first_R.mean()))
            mine, every = np.array(loop.windows, np.int64).sum(axis=(0, 1)).tolist()
            local.append(mine / every)
        step_s = _span(tpot_s)
        return Estimate(
            tpot_s=step_s,
            ttft_s=_span(ttft_s),
            tokens_per_s=tuple(N * asked.batch / s for s in reversed(step_s)),
            device_bytes=exactly(self.device_bytes),
            host_bytes=exactly(0),  # they read single blocks, and keep none elsewhere
            mapped_bytes=exactly(0),
            hit_ratio=_span(local),
            ppl_ratio=quality.ppl_ratio,
            agreement=quality.agreement,
        )


def _span(values: Sequence[float]) -> tuple[float, float, float]:
    return min(values), float(np.median(values)), max(values)


def _slots(
    base: OffloadOptions, asked: PlanOptions, live: Described, gpu: Gpu
) -> tuple[int, int]:
    """Slots of a GPU, and the bytes that it then holds."""
    options = base
    if asked.device_memory in (None, AUTO):
        free_bytes = int(gpu.device.memory_bytes * (1 - SPARE_SHARE))
        options = dataclasses.replace(base, device_memory=f"{free_bytes}B")
    options = dataclasses.replace(options, mode="layered")
    slots = len(layer_slots(options, live))
    return slots, live.needs(options).other_bytes + slots * live.block_bytes


def plan_servers(
    asked: PlanOptions,
    base: OffloadOptions,
    fixed: frozenset[str],
    out_dir: Path | None,
) -> Plan:
    """The plan of a cluster; raises as of `check_servers`."""
    begun_s, fleet = time.perf_counter(), check_servers(asked, base, fixed)
    notes = [
        "nothing was measured: bytes are exact, times are simulated by the machines' "
        f"rooflines and {asked.network:g} Mbit/s that each server sends",
        f"every server has {asked.batch} requests at once; ranges are of {DRAWS} draws "
        "of routing; device bytes are those of the fullest server",
    ]
    trace = given_trace(asked, fleet.model.config, notes)
    if trace is None:
        notes.append("routing is that of a generator fitted to public counts, a domain "
                     "a server")  # fmt: skip
    qualities, refused = admitted(asked, base, fixed, asked.model_path)
    known = [q for q in qualities if not q.options and q.k is None]
    known += unmeasured(known, fleet.model.config)
    found: list[tuple[Judged, Placement]] = []
    with counter("placements simulated") as count:
        for quality in known:
            try:
                case = _Case(asked, base, fleet, quality, trace)
            except (ConfigError, CapacityError) as error:
                refused.append(Refused.by(quality.label, error))
                continue
            problem = case.problem()
            placers, left_out = fit_placers(problem)
            if not found:
                refused += [Refused(f"placer {n}", why, "choose another machine or "
                            "placer") for n, why in left_out.items()]  # fmt: skip
            for name, placer in placers.items():
                if found and time.perf_counter() - begun_s > asked.search_s:
                    reason = f"the search's {asked.search_s:g} s were over"
                    what = f"placer {name}, {quality.label}"
                    refused.append(Refused(what, reason, "raise --search_s"))
                    continue
                given = case, quality, placer.solve(problem), out_dir
                found.append(_judged(asked, base, fleet, name, *given))
                count(1)
    order = ranked([judged for judged, _ in found], asked)
    placement = next(each for judged, each in found if judged is order[0])
    chosen = order[0].candidate.placement
    facts: Mapping = {} if chosen is None else chosen._asdict()
    # A file's writer gets the folder and its name; both files come from one call.
    files = {"placement": lambda at: placement.save(at, dict(facts))}
    seconds = time.perf_counter() - begun_s
    result = Found(order, [], len(found) * DRAWS, seconds)
    sources = ",".join(fleet.names), asked.trace
    return summed_up(asked, result, [], refused, notes, *sources, files, out_dir)


def _judged(
    asked: PlanOptions,
    base: OffloadOptions,
    fleet: Fleet,
    name: str,
    case: _Case,
    quality: Quality,
    placement: Placement,
    out_dir: Path | None,
) -> tuple[Judged, Placement]:
    stem = None if out_dir is None else str(out_dir / "placement")
    placed = Placed(name, fleet.names, case.slots_N, float(asked.network or 0), stem)
    fidelity = quality.ppl_ratio, quality.agreement
    candidate = Candidate(base, None, quality.expert_dtype, *fidelity, placed)
    return judge(candidate, case.estimate(placement, quality), asked), placement

"""Cases from names: models, clusters, workloads and arrivals that presets know."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.core.checks import (
    ConfigError,
    check_count,
    check_from_zero,
    check_known,
    check_positive,
)
from moe_edge.core.typed import changed
from moe_edge.evaluate.texts import find_file
from moe_edge.hardware.clusters import cluster_for
from moe_edge.hardware.models import ModelShape, model_shape
from moe_edge.simulate.cluster.pools import RoutingPools
from moe_edge.simulate.cluster.scenario import Scenario
from moe_edge.workload.arrivals import poisson_servers, trace_path, trace_requests
from moe_edge.workload.requests import (
    LENGTHS,
    OTHER,
    Request,
    fixed_requests,
    make_requests,
)
from moe_edge.workload.routing_model import (
    BIGBENCH,
    DOMAINS,
    MULTIDATA,
    RoutingModel,
)
from moe_edge.workload.trace_reader import read_trace

DEFAULT_INTERVAL_S = 10.0  # Prism, section IV-A
POOL_TOKENS = 4096  # of each domain
WORKLOADS = {"bigbench": BIGBENCH, "multidata": MULTIDATA}
POISSON_ONLY = ("interval_s", "then_workload", "input_tokens", "output_tokens")
GENERATED_ONLY = ("placed_for", "skew", "correlated", "narrow_tasks")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseOptions:
    """A case in names.

    Attributes:
      model: preset of its sizes.
      cluster: preset of machines, such as prism or mixed, or the path of a machine.json
        (`moe-edge profile_machine`).
      cluster_options: of the preset; Prism's share of memory for the model else.
      workload: bigbench, multidata, or one routing domain a server, by commas.
      then_workload: after these requests come as many of this workload (Poisson
        arrivals only).
      placed_for: workload whose frequencies the first placement sees; None: `workload`.
      arrivals: poisson, or a trace: azure_conv, azure_code, mooncake.
      interval_s: mean seconds between requests of a server, or one a server (default
        10; Poisson only).
      requests_per_server: how many; of a trace, times the servers in all.
      input_tokens: of every request, instead of the domain's (Poisson only).
      output_tokens: likewise.
      trace_speed: factor on the pace of a trace.
      most_tokens: cuts longer requests of a trace.
      skew: exponent on the generator's popularity of experts.
      correlated: whether a request's tokens resemble each other in routing.
      narrow_tasks: whether BIG-bench's tasks lie further apart than the measured
        domains that they are built from, by an assumed factor.
      routing_trace: route trace of the model that all requests follow, instead of the
        generator.
    Raises:
      ConfigError: out of range, or an option that would have no effect.
    """

    model: str = "deepseek_v2_lite"
    cluster: str = "prism"
    cluster_options: Mapping[str, Any] | None = None
    workload: str = "bigbench"
    then_workload: str | None = None
    placed_for: str | None = None
    arrivals: str = "poisson"
    interval_s: float | Sequence[float] | None = None
    requests_per_server: int = 100
    input_tokens: int | None = None
    output_tokens: int | None = None
    trace_speed: float = 1.0
    most_tokens: int | None = None
    skew: float = 1.0
    correlated: bool = True
    narrow_tasks: bool = True
    routing_trace: str | None = None

    def __post_init__(self):
        check_count("requests_per_server", self.requests_per_server)
        if self.most_tokens is not None:
            check_count("most_tokens", self.most_tokens)
        if self.arrivals == "poisson":
            names = ("trace_speed", "most_tokens")
            self._refuse_idle(names, "Poisson arrivals", "a trace")
        else:
            case = f"arrivals of {self.arrivals}"
            self._refuse_idle(POISSON_ONLY, case, "Poisson arrivals")
        for each_s in np.atleast_1d(self.mean_interval_s).tolist():
            check_positive("arrival interval_s", each_s)
        check_from_zero("skew", self.skew)
        if self.routing_trace is not None:
            self._refuse_idle(GENERATED_ONLY, "a routing_trace", "the generator")
        if (self.input_tokens is None) != (self.output_tokens is None):
            raise ConfigError("give both input_tokens and output_tokens, or neither")

    @property
    def mean_interval_s(self) -> float | Sequence[float]:
        """`interval_s`; of a trace: spread evenly over the servers."""
        return DEFAULT_INTERVAL_S if self.interval_s is None else self.interval_s

    def _refuse_idle(self, names: Sequence[str], case: str, needs: str) -> None:
        """Refuses options that would be ignored in a case, since they need another."""
        if idle := [name for name in changed(self) if name in names]:
            raise ConfigError(
                f"{', '.join(idle)} would have no effect with {case}, only with "
                f"{needs}; drop one of them"
            )


def server_domains(text: str, num_servers: int) -> list[str]:
    """One domain a server: a workload's or a list's, repeated as often as needed."""
    names = WORKLOADS.get(text) or tuple(part.strip() for part in text.split(","))
    for name in names:
        check_known("workload or routing domain", name, (*WORKLOADS, *DOMAINS))
    if len(names) > num_servers:
        raise ConfigError(f"{len(names)} domains for {num_servers} servers: {text}")
    return [names[n % len(names)] for n in range(num_servers)]


def build_scenario(
    *, data_dir: str | None = None, seed: int = 0, **options: Any
) -> Scenario:
    """A scenario from names.

    Args:
      data_dir: holds traces.
      seed: of arrivals, lengths and routing.
      **options: fields of `CaseOptions`.
    Raises:
      ConfigError: bad input, or an option that would have no effect.
    """
    given = CaseOptions(**options)
    shape = model_shape(given.model)
    machines = cluster_for(given.model, given.cluster, given.cluster_options)
    N = machines.num_servers
    domains = server_domains(given.workload, N)
    if given.arrivals == "poisson":
        requests = _poisson(given, domains, seed)
        if given.then_workload is not None:
            later = _poisson(given, server_domains(given.then_workload, N), seed + 1)
            requests = followed(requests, later, N)
    else:
        requests = trace_requests(
            trace_path(given.arrivals, data_dir),
            domains,
            count=given.requests_per_server * N,
            seed=seed,
            speed=given.trace_speed,
            most_tokens=given.most_tokens,
        )
    used = [*dict.fromkeys([*domains, *(request.domain for request in requests)])]
    if given.routing_trace is not None:
        path = find_file(given.routing_trace, data_dir, "--routing_trace")
        pools = traced_pools(path, shape, used)
        told, frequency = domains, pools.frequency
    else:
        names = ("skew", "correlated", "narrow_tasks")
        chosen = {name: getattr(given, name) for name in names}
        routing = RoutingModel.like(shape, **chosen)
        pools = RoutingPools.sampled(routing, used, seed, POOL_TOKENS)
        told = server_domains(given.placed_for or given.workload, N)
        frequency = routing.frequencies
    known = {domain: frequency(domain) for domain in set(told)}
    lengths_N2 = np.array([_lengths(requests, n, d) for n, d in enumerate(domains)])
    rate_N = 1 / np.asarray(given.mean_interval_s, float)
    share_N = rate_N * lengths_N2.sum(axis=1)
    share_N /= share_N.sum()
    frequency_NLE = np.stack([known[d] for d in told]) * share_N[:, None, None]
    cost_model = shape.costs(machines)
    return Scenario(shape, cost_model, requests, pools, frequency_NLE, lengths_N2)


def traced_pools(path: str, shape: ModelShape, domains: Sequence[str]) -> RoutingPools:
    """One recorded routing for all domains.

    Raises:
      ConfigError: of a model of another shape.
    """
    pools = RoutingPools.recorded(read_trace(path, shape.num_experts), domains)
    got = (pools.num_layers, pools.num_experts, pools.top_k)
    expected = (shape.num_layers, shape.num_experts, shape.top_k)
    if got != expected:
        raise ConfigError(
            f"route trace {path} has (layers, experts, top k) {got}, model "
            f"{shape.name} has {expected}; name the model that it was recorded from"
        )
    return pools


def followed(
    first: Sequence[Request], later: Sequence[Request], num_servers: int
) -> list[Request]:
    """Both, the later ones of each server after its last of the first."""
    last_N = np.zeros(num_servers)
    for request in first:
        last_N[request.server] = max(last_N[request.server], request.arrival_s)
    moved = [
        dataclasses.replace(r, arrival_s=r.arrival_s + float(last_N[r.server]))
        for r in later
    ]
    rows = sorted([*first, *moved], key=lambda r: (r.arrival_s, r.server))
    return [dataclasses.replace(row, id=number) for number, row in enumerate(rows)]


def _poisson(given: CaseOptions, domains: Sequence[str], seed: int) -> list[Request]:
    times = poisson_servers(
        given.mean_interval_s, len(domains), given.requests_per_server, seed
    )
    if given.input_tokens is None:
        return make_requests(domains, times, seed=seed)
    return fixed_requests(domains, times, given.input_tokens, given.output_tokens)


def _lengths(requests: Sequence[Request], server: int, domain: str) -> list[float]:
    """Mean prompt and answer at a server, of its first domain."""
    mine = [
        (request.input_tokens, request.output_tokens)
        for request in requests
        if request.server == server and request.domain == domain
    ]
    if not mine:
        known = LENGTHS.get(domain, OTHER)
        return [known.input_mean, known.output_mean]
    return np.mean(mine, axis=0).tolist()

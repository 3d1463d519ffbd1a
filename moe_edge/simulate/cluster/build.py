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
from moe_edge.evaluate.texts import find_path
from moe_edge.hardware.clusters import cluster_for
from moe_edge.hardware.models import ModelShape, model_shape
from moe_edge.simulate.cluster.case import Case
from moe_edge.simulate.cluster.pools import RoutingPools
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
WORKLOADS = {"bigbench": BIGBENCH, "multidata": MULTIDATA}


def server_domains(text: str, num_servers: int) -> list[str]:
    """One domain a server: a workload's or a list's, repeated as often as needed."""
    names = WORKLOADS.get(text) or tuple(part.strip() for part in text.split(","))
    for name in names:
        check_known("workload or routing domain", name, (*WORKLOADS, *DOMAINS))
    if len(names) > num_servers:
        raise ConfigError(f"{len(names)} domains for {num_servers} servers: {text}")
    return [names[n % len(names)] for n in range(num_servers)]


def build_case(
    *,
    model: str = "deepseek_v2_lite",
    cluster: str = "prism",
    cluster_options: Mapping[str, Any] | None = None,
    workload: str = "bigbench",
    then_workload: str | None = None,
    placed_for: str | None = None,
    arrivals: str = "poisson",
    interval_s: float | Sequence[float] | None = None,
    requests_per_server: int = 100,
    input_tokens: int | None = None,
    output_tokens: int | None = None,
    trace_speed: float = 1.0,
    most_tokens: int | None = None,
    skew: float = 1.0,
    correlated: bool = True,
    routing_trace: str | None = None,
    data_dir: str | None = None,
    seed: int = 0,
) -> Case:
    """A case from names.

    Args:
      model, cluster, cluster_options: presets, or as cluster the path of a
        machine.json (`launch/profile_machine.py`); Prism's share of memory for the
        model unless the options say another one.
      workload: "bigbench", "multidata", or domains, one a server.
      then_workload: after `requests_per_server` requests come as many of this one
        (Poisson arrivals only).
      placed_for: the workload whose frequencies placers are told before anything was
        served; None: `workload`.
      arrivals: "poisson", or the name of a trace (its lengths too).
      interval_s: mean gap at each server, one or one each; None: 10 s (Poisson only).
      requests_per_server: how many; of a trace, times the servers in all.
      input_tokens, output_tokens: same for all requests instead of the domain's
        (Poisson only).
      trace_speed, most_tokens: see `trace_requests` (traces only).
      skew: of the domains, see `RoutingModel`.
      correlated: tokens and layers, see `RoutingModel`.
      routing_trace: route trace that all requests follow, instead of the generator;
        its layers, experts and top k must be the model's.
      data_dir: holds traces.
      seed: of arrivals, lengths and routing.
    Raises:
      ConfigError: bad input, or an option that would have no effect.
    """
    check_count("requests_per_server", requests_per_server)
    if most_tokens is not None:
        check_count("most_tokens", most_tokens)
    if arrivals == "poisson":
        ignored = {"trace_speed": (trace_speed, 1), "most_tokens": (most_tokens, None)}
        refuse_idle(ignored, "Poisson arrivals", "a trace")
    else:
        ignored = {
            "interval_s": (interval_s, None),
            "then_workload": (then_workload, None),
            "input_tokens": (input_tokens, None),
            "output_tokens": (output_tokens, None),
        }
        refuse_idle(ignored, f"arrivals of {arrivals}", "Poisson arrivals")
    if interval_s is None:
        interval_s = DEFAULT_INTERVAL_S  # of a trace: spread evenly over the servers
    for each_s in np.atleast_1d(interval_s).tolist():
        check_positive("arrival interval_s", each_s)
    check_from_zero("skew", skew)
    if routing_trace is not None:
        generated = {"skew": (skew, 1), "correlated": (correlated, True)}
        generated = {"placed_for": (placed_for, None)} | generated
        refuse_idle(generated, "a routing_trace", "the generator")
    shape = model_shape(model)
    machines = cluster_for(model, cluster, cluster_options)
    N = machines.num_servers
    domains = server_domains(workload, N)
    if arrivals == "poisson":
        requests = _poisson(
            domains, interval_s, requests_per_server, input_tokens, output_tokens, seed
        )
        if then_workload is not None:
            later = _poisson(
                server_domains(then_workload, N),
                *(interval_s, requests_per_server, input_tokens, output_tokens),
                seed + 1,
            )
            requests = followed(requests, later, N)
    else:
        requests = trace_requests(
            trace_path(arrivals, data_dir),
            domains,
            count=requests_per_server * N,
            seed=seed,
            speed=trace_speed,
            most_tokens=most_tokens,
        )
    used = [*dict.fromkeys([*domains, *(request.domain for request in requests)])]
    if routing_trace is not None:
        pools = traced_pools(find_path(routing_trace, data_dir), shape, used)
        told = domains
        known = {domain: pools.frequency(domain) for domain in used}
    else:
        routing = RoutingModel.like(shape, skew=skew, correlated=correlated)
        pools = RoutingPools.sampled(routing, used, seed)
        told = server_domains(placed_for or workload, N)
        known = {domain: routing.frequencies(domain) for domain in set(told)}
    lengths_N2 = np.array([_lengths(requests, n, d) for n, d in enumerate(domains)])
    rate_N = 1 / np.broadcast_to(np.asarray(interval_s, float), N)
    share_N = rate_N * lengths_N2.sum(axis=1)
    share_N /= share_N.sum()
    frequency_NLE = np.stack([known[d] for d in told]) * share_N[:, None, None]
    cost_model = shape.costs(machines)
    return Case(shape, cost_model, requests, pools, frequency_NLE, lengths_N2)


def traced_pools(path: str, shape: ModelShape, domains: Sequence[str]) -> RoutingPools:
    """One recorded routing for all domains.

    Raises:
      ConfigError: of a model of another shape.
    """
    pools = RoutingPools.recorded(
        dict.fromkeys(domains, read_trace(path, shape.num_experts))
    )
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


def _poisson(domains, interval_s, count, input_tokens, output_tokens, seed):
    times = poisson_servers(interval_s, len(domains), count, seed)
    if input_tokens is None and output_tokens is None:
        return make_requests(domains, times, seed=seed)
    if input_tokens is None or output_tokens is None:
        raise ConfigError("give both input_tokens and output_tokens, or neither")
    return fixed_requests(domains, times, input_tokens, output_tokens)


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


def refuse_idle(given: Mapping[str, tuple], case: str, needs: str) -> None:
    """Refuses options that would be ignored.

    Args:
      given: option -> what it is, and what it is if not given.
      case: in which they are ignored.
      needs: what they belong to.
    Raises:
      ConfigError: one was set.
    """
    names = [name for name, (value, default) in given.items() if value != default]
    if names:
        raise ConfigError(
            f"{', '.join(names)} would have no effect with {case}, only with {needs}; "
            "drop one of them"
        )

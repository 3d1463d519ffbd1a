"""The root of launch/place_experts.py: placements of all methods, side by side."""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.core.checks import ConfigError, check_known
from moe_edge.core.files import atomic_folder, check_out_dir
from moe_edge.evaluate.texts import find_path, sha256_of
from moe_edge.hardware.clusters import build_cluster, servers_of
from moe_edge.hardware.cost_model import BlockShape, CostModel
from moe_edge.hardware.models import model_shape
from moe_edge.hardware.presets import lan
from moe_edge.hardware.specs import Cluster
from moe_edge.place.latency_aware import LatencyAware
from moe_edge.place.objective import objective
from moe_edge.place.placer import Problem
from moe_edge.place.plan import Placement, check_slots
from moe_edge.place.policy import PLACERS, get_placer
from moe_edge.place.statistics import read_statistics
from moe_edge.workload.routing_model import BIGBENCH, RoutingModel

# Statistics say nothing of machines: these are assumed for whoever looks at time.
ASSUMED_GPU, ASSUMED_MBPS = "a100_40g", 500.0
BLOCKS = {"Mixtral-8x7B-v0.1": BlockShape(4096, 14336, 2)}
OTHER_BLOCK = BlockShape(2048, 1024, 2)  # OLMoE's


@dataclasses.dataclass(frozen=True)
class Case:
    """What is to be placed where.

    Attributes:
      frequency_NLE: calls of blocks, rows sum to 1.
      slots: of every server's GPUs.
      cost_model: seconds.
      top_k: blocks a token calls.
      facts: for the report.
    """

    frequency_NLE: np.ndarray
    slots: tuple[np.ndarray, ...]
    cost_model: CostModel
    top_k: int
    facts: Mapping[str, Any]


def run_place(
    *,
    out_dir: str,
    statistics: str | None = None,
    model: str | None = None,
    top_k: int | None = None,
    server_domains: str | None = None,
    slots: str | None = None,
    cluster: str | None = None,
    cluster_options: Mapping[str, Any] | None = None,
    methods: str = "all",
    prompt_tokens: float = 256.0,
    output_tokens: float = 32.0,
    data_dir: str | None = None,
    seed: int = 0,
    overwrite: bool = False,
    dry_run: bool = False,
    config_text: Callable[[], str] = str,
) -> dict[str, Any]:
    """Places the experts of a model by every method and compares them.

    Either `statistics` and `slots` say what is called and what fits, or a preset
    `model` on a preset `cluster` with routing from the committed generator.

    Args:
      out_dir: folder of `place.json`, `config.gin`, and of `placement_METHOD.npy`
        (bool [servers, layers, experts]) with `.json` (GPUs) for every method.
      statistics: file in the schema of expert_counts.jsonl.
      model: of the statistics, if they hold several; or the preset.
      top_k: of the statistics, if they hold several.
      server_domains: one domain a server, separated by commas.
      slots: with `statistics`, blocks that fit on each server over all layers of the
        file, separated by commas; `80+80` is a server of two GPUs.
      cluster, cluster_options: preset and its options.
      methods: placers separated by commas, or `all` that fit the machines.
      prompt_tokens, output_tokens: of a mean request, for the predicted latency.
      data_dir: where a relative path is looked up too.
      seed: of what is random.
      overwrite: replace earlier results.
      dry_run: check and stop.
      config_text: gives the config to store.
    Raises:
      ConfigError: bad input; CapacityError: less memory than one copy.
      OutputError: `out_dir` cannot be written.
      OSError: statistics cannot be read.
    """
    check_out_dir(out_dir, overwrite)
    names = chosen_methods(methods)
    if statistics is not None:
        if cluster is not None:
            raise ConfigError("--statistics needs --slots, not --cluster; give one")
        case = statistics_case(
            find_path(statistics, data_dir), model, top_k, server_domains, slots
        )
    else:
        if slots is not None or top_k is not None:
            raise ConfigError("--slots and --top_k belong to --statistics; give it too")
        case = preset_case(
            model or "deepseek_v2_lite",
            cluster or "prism",
            cluster_options or {},
            server_domains,
        )
    timing = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    latency = get_placer("latency", top_k=case.top_k, **timing)
    if dry_run:
        return {"dry_run": True, "out_dir": out_dir, **case.facts}
    placed, left_out = place_all(names or PLACERS, latency, case, seed, names is None)
    best = get_placer("optimal").place(case.frequency_NLE, case.slots).on_NLE
    rows = compare(placed, objective(case.frequency_NLE, best), latency, case)
    with atomic_folder(out_dir, overwrite) as folder:
        for name, (placement, _) in placed.items():
            facts = {"method": name, **case.facts}
            placement.save(folder / f"placement_{name}", facts)
        stored = {**case.facts, "seed": seed, "methods": rows, "left_out": left_out}
        text = json.dumps(stored, indent=1, allow_nan=False) + "\n"
        (folder / "place.json").write_text(text, encoding="utf-8")
        (folder / "config.gin").write_text(config_text(), encoding="utf-8")
    print_table(rows, left_out)
    return {"methods": rows, "left_out": left_out, "out_dir": out_dir}


def chosen_methods(methods: str) -> list[str] | None:
    """Names, checked; None for `all`."""
    if methods == "all":
        return None
    names = list(dict.fromkeys(part.strip() for part in methods.split(",")))
    for name in names:
        check_known("placer", name, PLACERS)
    return names


def statistics_case(
    path: str | Path,
    model: str | None,
    top_k: int | None,
    server_domains: str | None,
    slots: str | None,
) -> Case:
    """A case from measured counts."""
    if server_domains is None or slots is None:
        raise ConfigError(
            "--statistics needs --server_domains (one a server) and --slots, such as "
            "--server_domains c4,github,book --slots 80,80,160"
        )
    stats = read_statistics(path, server_domains.split(","), model, top_k)
    N, L, E = stats.frequency_NLE.shape
    block = BLOCKS.get(stats.model, OTHER_BLOCK)
    checked = check_slots(parse_slots(slots), N, L * E, block.num_bytes)
    machines = servers_of([[ASSUMED_GPU] * len(slots_G) for slots_G in checked])
    cost_model = CostModel(Cluster(servers=machines, network=lan(ASSUMED_MBPS)), block)
    facts = {
        "statistics": str(path),
        "statistics_sha256": sha256_of(path),
        "model": stats.model,
        "layers": list(stats.layers),
        "server_domains": list(stats.domains),
        "slots": [slots_G.tolist() for slots_G in checked],
        "assumed": f"{ASSUMED_GPU} GPUs, {ASSUMED_MBPS:.0f} Mbps between servers",
    }
    return Case(stats.frequency_NLE, checked, cost_model, stats.top_k, facts)


def preset_case(
    model: str,
    cluster: str,
    cluster_options: Mapping[str, Any],
    server_domains: str | None,
) -> Case:
    """A case from presets; routing from the committed generator."""
    shape = model_shape(model)
    machines = build_cluster(cluster, **cluster_options)
    N = machines.num_servers
    domains = list(BIGBENCH) if server_domains is None else server_domains.split(",")
    if server_domains is None:
        domains = [domains[n % len(domains)] for n in range(N)]
    if len(domains) != N:
        raise ConfigError(
            f"--server_domains names {len(domains)} domains, cluster {cluster} has {N} "
            "servers; name one a server"
        )
    source = "mixtral" if shape.name.startswith("mixtral") else "olmoe"
    routing = RoutingModel.load(
        source,
        num_layers=shape.num_layers,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
    )
    by_domain = {domain: routing.frequencies(domain) for domain in set(domains)}
    fits = check_slots(
        machines.slots(shape.block.num_bytes),
        N,
        shape.num_blocks,
        shape.block.num_bytes,
    )
    facts = {
        "model": shape.name,
        "cluster": cluster,
        "cluster_options": dict(cluster_options),
        "routing": f"generator fitted to {source}",
        "server_domains": domains,
        "slots": [slots_G.tolist() for slots_G in fits],
    }
    frequency_NLE = np.stack([by_domain[domain] for domain in domains])
    return Case(frequency_NLE, fits, shape.costs(machines), shape.top_k, facts)


def parse_slots(text: str) -> list[np.ndarray]:
    """`80,80,80+80` -> one int array a server, one number a GPU."""
    servers = []
    for part in str(text).split(","):
        numbers = [number.strip() for number in part.split("+")]
        if not all(n.isascii() and n.isdigit() for n in numbers):
            raise ConfigError(
                f"--slots is {str(text)!r}, expected whole numbers separated by commas"
                ", such as 80,80,160 (80+80: a server of two GPUs)"
            )
        servers.append(np.array([int(n) for n in numbers], np.int64))
    return servers


def place_all(
    names: Sequence[str], latency: LatencyAware, case: Case, seed: int, skip: bool
) -> tuple[dict[str, tuple[Placement, float]], dict[str, str]]:
    """Placement and seconds of every method, and why others are left out.

    Args:
      skip: whether methods that refuse these machines are left out.
    """
    placed, left_out = {}, {}
    for name in names:
        placer = latency if name == latency.name else get_placer(name)
        started = time.perf_counter()
        try:
            placement = placer.place(
                case.frequency_NLE, case.slots, case.cost_model, seed=seed
            )
        except ConfigError as error:
            if not skip:
                raise
            left_out[name] = str(error)
            continue
        placed[name] = (placement, time.perf_counter() - started)
    return placed, left_out


def compare(
    placed: Mapping[str, tuple[Placement, float]],
    least: float,
    latency: LatencyAware,
    case: Case,
) -> dict[str, dict[str, Any]]:
    """A row a method.

    Args:
      least: objective of the optimum.
    """
    problem = Problem(case.frequency_NLE, case.slots, case.cost_model)
    model = latency.model(problem)
    servers_layers = case.frequency_NLE.shape[0] * case.frequency_NLE.shape[1]
    rows = {}
    for name, (placement, seconds) in placed.items():
        value = objective(case.frequency_NLE, placement.on_NLE)
        gap = None if least == 0 else 100 * (value - least) / least
        rows[name] = {
            "objective": value,
            "gap_pct": 0.0 if value == least else gap,
            "remote_share": value / servers_layers,
            "coverage": placement.coverage,
            "memory_use": placement.memory_use(case.slots),
            "predicted_s": model.seconds(placement.on_NLE),
            "seconds": round(seconds, 4),
        }
    return rows


def print_table(rows: Mapping[str, Mapping[str, Any]], left_out: Mapping[str, str]):
    """The comparison for people."""
    print(
        f"{'method':20}{'objective':>11}{'gap %':>8}{'remote %':>10}{'coverage':>10}"
        f"{'memory %':>10}{'predicted s':>13}{'took s':>9}"
    )
    for name, row in rows.items():
        gap = "-" if row["gap_pct"] is None else f"{row['gap_pct']:.2f}"
        print(
            f"{name:20}{row['objective']:11.4f}{gap:>8}"
            f"{100 * row['remote_share']:10.2f}{row['coverage']:10.3f}"
            f"{100 * row['memory_use']:10.1f}{row['predicted_s']:13.4f}"
            f"{row['seconds']:9.3f}"
        )
    for name, reason in left_out.items():
        print(f"{name:20}left out: {reason}")

"""The root of `moe-edge place_experts`: placements of all methods, side by side."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_edge.core.checks import ConfigError
from moe_edge.core.files import write_json
from moe_edge.core.progress import progress
from moe_edge.core.run_folder import RunFolder, root
from moe_edge.evaluate.texts import find_file
from moe_edge.place.cases import preset_case, statistics_case
from moe_edge.place.latency_model import LatencyModel
from moe_edge.place.optimal import objective
from moe_edge.place.placer import (
    Placer,
    PlacerOptions,
    fit_placers,
    get_placer,
    listed_placers,
)
from moe_edge.place.plan import Placement
from moe_edge.place.problem import Problem, Traffic


@root
def run_place(
    run: RunFolder,
    *,
    statistics: str | None = None,
    model: str | None = None,
    top_k: int | None = None,
    server_domains: str | None = None,
    slots: str | None = None,
    checkpoint: str | None = None,
    d_model: int | None = None,
    expert_dim: int | None = None,
    cluster: str | None = None,
    cluster_options: Mapping[str, Any] | None = None,
    methods: str | Sequence[str | Placer | type[Placer]] = "all",
    placer_options: PlacerOptions | None = None,
    prompt_tokens: float = 256.0,
    output_tokens: float = 32.0,
    data_dir: str | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Places the experts of a model by every method and compares them.

    Either `statistics` say what is called, and `slots` or the memory of a `cluster`
    what fits, or a preset `model` on a preset `cluster` is called as the committed
    generator of routing does.

    Args:
      run: folder of `place.json`, `config.gin`, and of `placement_METHOD.npy`
        (bool [servers, layers, experts]) with `.json` (GPUs) for every method.
      statistics: file of how often each expert was called, one JSON line a model,
        domain and layer (the schema of expert_counts.jsonl).
      model: which model, where `statistics` hold several; without `statistics` a
        preset.
      top_k: experts a token, where `statistics` hold several values.
      server_domains: the domain whose calls each server gets, separated by commas.
      slots: with `statistics`: how many experts fit on each server over all layers,
        separated by commas; `80+80` is a server of two GPUs.
      checkpoint: with `statistics`: the model that was counted, for the bytes of its
        experts; default: the model that the statistics name.
      d_model: with `statistics`: width of the model, instead of `checkpoint`; weights
        are then taken to be bfloat16.
      expert_dim: with `statistics`: neurons of an expert, instead of `checkpoint`.
      cluster: preset of machines or path of a machine.json; with `statistics` and no
        `slots`, what fits in its memory. `statistics` without it: A100s of 40 GB and
        500 Mbit/s between servers are assumed where times matter, and named.
      cluster_options: of the preset.
      methods: placers, separated by commas; `all`: every one that fits the machines;
        from Python also a list of names, classes and objects.
      placer_options: {name: {option: value}}.
      prompt_tokens: tokens of a mean prompt, for the predicted latency.
      output_tokens: tokens of a mean answer, for the predicted latency.
      data_dir: folder in which relative paths are looked up, too.
      seed: of what is random.
    Raises:
      MoeEdgeError: bad input, or less memory than one copy of the model.
      OSError: statistics cannot be read.
    """
    named = listed_placers(methods, placer_options)
    if statistics is not None:
        problem, facts = statistics_case(
            find_file(statistics, data_dir, "--statistics"),
            *(model, top_k, server_domains, slots, checkpoint, d_model, expert_dim),
            *(cluster, cluster_options or {}),
        )
    else:
        if slots is not None or top_k is not None:
            raise ConfigError("--slots and --top_k belong to --statistics; give it too")
        if (checkpoint, d_model, expert_dim) != (None, None, None):
            raise ConfigError(
                "--checkpoint, --d_model and --expert_dim belong to --statistics; "
                "presets have theirs"
            )
        problem, facts = preset_case(
            model or "deepseek_v2_lite",
            cluster or "prism",
            cluster_options or {},
            server_domains,
        )
    traffic = Traffic(problem.traffic.top_k, prompt_tokens, output_tokens)
    problem = dataclasses.replace(problem, seed=seed, traffic=traffic)
    if run.dry_run:
        return facts
    placers = {name: each for name, each in (named or {}).items() if each}
    left_out: dict[str, str] = {}
    if named is None:
        placers, left_out = fit_placers(problem, placer_options)
    placed = place_all(problem, placers)
    rows = compare(placed, problem)
    stored = {**facts, "seed": seed, "methods": rows, "left_out": left_out}

    def save(folder: Path) -> None:
        for name, (placement, _) in placed.items():
            placement.save(folder / f"placement_{name}", {"method": name, **facts})
        write_json(folder / "place.json", stored)

    run.write(save)
    for name in ("coverage", "assumed"):
        if facts.get(name):
            print(f"{name}: {facts[name]}")
    print_table(rows, left_out)
    return {"methods": rows, "left_out": left_out}


# What the columns of the table mean.
LEGEND = """\
objective    remote share of the calls to experts, summed over servers and layers
             (Prism, equation 2); lower is better. gap %: above the least possible
remote %     share of the calls to experts that another server answers
coverage     share of the experts that some server holds; memory %: slots in use
predicted s  latency of a mean request, by the cost model. took s: to find it"""


def place_all(
    problem: Problem, placers: Mapping[str, Placer]
) -> dict[str, tuple[Placement, float]]:
    """Placement and seconds of every placer."""
    placed = {}
    for name, placer in progress(placers.items(), "placements found"):
        started = time.perf_counter()
        placement = placer.solve(problem)
        placed[name] = (placement, time.perf_counter() - started)
    return placed


def compare(
    placed: Mapping[str, tuple[Placement, float]], problem: Problem
) -> dict[str, dict[str, Any]]:
    """A row a method."""
    frequency_NLE = problem.frequency_NLE
    optimum, least = get_placer("optimal"), None
    if optimum.unfit(problem) is None:
        least = objective(frequency_NLE, optimum.solve(problem).on_NLE)
    model = LatencyModel.of(problem)
    servers_layers = frequency_NLE.shape[0] * frequency_NLE.shape[1]
    rows = {}
    for name, (placement, seconds) in placed.items():
        value = objective(frequency_NLE, placement.on_NLE)
        gap = 100 * (value - least) / least if least else None
        rows[name] = {
            "objective": value,
            "gap_pct": 0.0 if value == least else gap,
            "remote_share": value / servers_layers,
            "coverage": placement.coverage,
            "memory_use": placement.memory_use(problem.slots),
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
    print(LEGEND)

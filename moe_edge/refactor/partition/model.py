"""Partitions every expert of a model, streaming activations from disk.

Experts are independent, so each is read, solved and dropped; a few threads share the
cores. Results are kept layer by layer, and a later call goes on after the last one.
"""

import dataclasses
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from moe_edge.core.checks import check_count
from moe_edge.refactor.partition.blas_threads import one_blas_thread
from moe_edge.refactor.partition.objective import order_by_mass
from moe_edge.refactor.partition.problem import build_problem, check_split
from moe_edge.refactor.partition.report import HELDOUT_RATIO, qualities, split_rows
from moe_edge.refactor.partition.solve import (
    BASELINES,
    DEFAULT,
    check_solver,
    run_solver,
)
from moe_edge.refactor.partition.store import (
    check_settings,
    read_layer,
    write_layer,
)

MIN_TOKENS = 64  # an expert with fewer is not solved: see `partition_expert`


class Source(Protocol):
    """What is read of a profile (`profile.reader.Profile` is one)."""

    layers: tuple[int, ...]
    num_experts: int
    neurons: int

    def activations(self, layer: int, expert: int) -> np.ndarray: ...

    def gate_weights(self, layer: int, expert: int) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """How every expert is cut.

    Attributes:
      subs, inactive: U and the objective's K.
      solver, restarts, seed, normalise: of `solve`; restarts None: its default.
      gate_weighted: weight tokens by what the router gave the expert.
      heldout_ratio: share of an expert's tokens that only scores.
      min_tokens: fitted tokens below which an expert is not solved.
      baselines: score BASELINES too.
    """

    subs: int
    inactive: int
    solver: str = DEFAULT
    restarts: int | None = None
    seed: int = 0
    normalise: bool = False
    gate_weighted: bool = False
    heldout_ratio: float = HELDOUT_RATIO
    min_tokens: int = MIN_TOKENS
    baselines: bool = True

    def solver_options(self) -> dict[str, Any]:
        return {} if self.restarts is None else {"restarts": self.restarts}


@dataclasses.dataclass(frozen=True)
class ModelPartition:
    """Attributes:
    labels_LEF: int16, sub-expert of each neuron, the most important one 0; L are rows
      of `Source.layers`.
    experts: one row each: layer, expert, tokens, seconds, rule (`solved`, or what an
      expert with too few tokens got), fitted and heldout: method -> `quality`.
    seconds: of all layers, those of earlier calls too.
    """

    labels_LEF: np.ndarray
    experts: list[dict[str, Any]]
    seconds: float

    def summary(self) -> dict[str, Any]:
        """Sums over experts: objective, objective_heldout, shares by method, rules.

        Shares are of solved experts only: baselines have no others.
        """
        rules: dict[str, int] = {}
        for row in self.experts:
            rules[row["rule"]] = rules.get(row["rule"], 0) + 1
        solved = [row for row in self.experts if row["rule"] == "solved"]
        shares = {
            part: {
                name: _ratio_of_sums([r[part][name] for r in solved if r[part]])
                for name in dict.fromkeys(n for r in solved for n in r[part])
            }
            for part in ("fitted", "heldout")
        }
        return {
            "objective": _sum_of(self.experts, "fitted"),
            "objective_heldout": _sum_of(self.experts, "heldout"),
            "shares": shares,
            "rules": rules,
            "seconds": self.seconds,
        }


def _sum_of(rows: list[dict], part: str) -> float | None:
    found = [row[part]["partition"]["objective"] for row in rows if row[part]]
    return float(sum(found)) if found else None


def _ratio_of_sums(scores: list[dict]) -> float:
    total = sum(score["total"] for score in scores)
    return sum(score["objective"] for score in scores) / total if total > 0 else 0.0


def partition_model(
    source: Source,
    work_dir: str | Path,
    options: PartitionOptions,
    *,
    neuron_weights: Callable[[int, int], np.ndarray] | None = None,
    fingerprint: str = "",
    threads: int | None = None,
    report: Callable[[str], None] | None = print,
) -> ModelPartition:
    """Cuts every expert of every layer; goes on where an earlier call stopped.

    Args:
      source: activations by layer and expert, float16 [T, F].
      work_dir: keeps `labels_LLL.npy` and `experts_LLL.json` of finished layers.
      options: how to cut.
      neuron_weights: (layer, expert) -> float [F], such as norms of the down columns;
        called from several threads. Also decides for experts with too few tokens.
      fingerprint: of the source and the weights; part of what a resumed call checks.
      threads: experts at a time; None: the cores.
      report: takes a line after each layer; None: silent.
    Raises:
      ConfigError: bad options.
      OutputError: `work_dir` holds layers made with other settings.
    """
    check_split(source.neurons, options.subs, options.inactive)
    check_solver(options.solver, options.solver_options())
    split_rows(1, options.heldout_ratio, 0)
    check_count("min_tokens", options.min_tokens)
    threads = len(os.sched_getaffinity(0)) if threads is None else threads
    check_count("threads", threads)
    work_dir = Path(work_dir)
    check_settings(
        work_dir,
        dataclasses.asdict(options)
        | {
            "layers": list(source.layers),
            "num_experts": source.num_experts,
            "neurons": source.neurons,
            "neuron_weighted": neuron_weights is not None,
            "fingerprint": fingerprint,
        },
    )
    labels, rows, seconds = [], [], 0.0
    with one_blas_thread(), ThreadPoolExecutor(threads) as pool:
        for number, layer in enumerate(source.layers, start=1):
            finished = read_layer(
                work_dir, layer, source.num_experts, source.neurons, options.subs
            )
            if finished is None:
                started = time.perf_counter()

                def one(expert: int, layer: int = layer):
                    weigh = neuron_weights and neuron_weights(layer, expert)
                    return partition_expert(source, layer, expert, options, weigh)

                found = list(pool.map(one, range(source.num_experts)))
                finished = (
                    np.stack([labels_F for labels_F, _ in found]),
                    [row for _, row in found],
                    time.perf_counter() - started,
                )
                write_layer(work_dir, layer, *finished)
            labels.append(finished[0])
            rows += finished[1]
            seconds += finished[2]
            if report is not None:
                done = f"{number}/{len(source.layers)}"
                report(f"partition: layer {layer} ({done}), {seconds:.0f} s")
    return ModelPartition(np.stack(labels), rows, seconds)


def partition_expert(
    source: Source,
    layer: int,
    expert: int,
    options: PartitionOptions,
    neuron_weights_F: np.ndarray | None = None,
) -> tuple[np.ndarray, dict[str, Any]]:
    """Labels int16 [F] of one expert, and its row of the report.

    Rule for few tokens: with fewer than `min_tokens` fitted ones nothing is solved;
    neurons are sorted by their weight (rule `neuron_weights`), or stay in the order
    they are stored if there is none (rule `contiguous`).
    """
    started = time.perf_counter()
    M_TF = source.activations(layer, expert)
    F, U = source.neurons, options.subs
    fit, held = split_rows(max(len(M_TF), 1), options.heldout_ratio, options.seed)
    row = {"layer": layer, "expert": expert, "tokens": len(M_TF)}
    if len(M_TF) == 0 or len(fit) < options.min_tokens:
        mass_F = np.zeros(F) if neuron_weights_F is None else neuron_weights_F
        order = np.argsort(-np.asarray(mass_F), kind="stable")
        labels = np.empty(F, np.int64)
        labels[order] = np.repeat(np.arange(U), F // U)
        row["rule"] = "contiguous" if neuron_weights_F is None else "neuron_weights"
        partitions = {}
    else:
        weights_T = None
        if options.gate_weighted:
            weights_T = np.asarray(source.gate_weights(layer, expert))[fit]
        problem = build_problem(
            M_TF[fit],
            U,
            options.inactive,
            normalise=options.normalise,
            neuron_weights_F=neuron_weights_F,
            token_weights_T=weights_T,
        )
        seed = _seed_of(options.seed, layer, expert)
        labels, _ = run_solver(
            problem, options.solver, seed, **options.solver_options()
        )
        labels, row["rule"] = order_by_mass(problem.mass_F, labels, U), "solved"
        names = BASELINES if options.baselines else ()
        partitions = {name: run_solver(problem, name, seed)[0] for name in names}
    partitions = {"partition": labels} | partitions
    for part, rows in (("fitted", fit), ("heldout", held)):
        some = len(M_TF) and len(rows)
        row[part] = (
            qualities(M_TF[rows], partitions, U, options.inactive) if some else {}
        )
    row["seconds"] = time.perf_counter() - started
    return labels.astype(np.int16), row


def _seed_of(seed: int, layer: int, expert: int) -> int:
    """Another one for every expert, whatever the order they are solved in."""
    return int(np.random.SeedSequence([seed, layer, expert]).generate_state(1)[0])

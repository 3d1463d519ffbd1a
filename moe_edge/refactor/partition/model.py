"""Partitions every expert of a model, streaming activations from disk.

Experts are independent, so each is read, solved and dropped; a few threads share the
cores. Finished layers are kept on disk, and a later call goes on after the last one.
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
from moe_edge.core.progress import counter
from moe_edge.refactor.partition.alternate import one_blas_thread
from moe_edge.refactor.partition.objective import order_by_mass, qualities
from moe_edge.refactor.partition.problem import (
    HELDOUT_RATIO,
    build_problem,
    check_split,
    split_rows,
)
from moe_edge.refactor.partition.solve import (
    BASELINES,
    DEFAULT,
    check_solver,
    run_solver,
)
from moe_edge.refactor.partition.store import LayerStore

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
    """How an expert's neurons are cut into sub-experts.

    Attributes:
      sub_experts: U.
      inactive: K of the partition objective; None: U - 1, the paper's.
      solver: of `solve.SOLVERS`; None: alternate.
      restarts: of solver alternate; None: its default.
      normalise: divide every neuron by its mean magnitude before solving.
      weigh_tokens: by their router weight, before solving.
      heldout_ratio: share of each expert's tokens that is not fitted on, only scored.
      min_tokens: experts with fewer fitted tokens are split by their weights' norms.
      seed: of everything random.
    """

    sub_experts: int = 4
    inactive: int | None = None
    solver: str | None = None
    restarts: int | None = None
    normalise: bool = False
    weigh_tokens: bool = False
    heldout_ratio: float = HELDOUT_RATIO
    min_tokens: int = MIN_TOKENS
    seed: int = 0

    def check(self, neurons: int) -> None:
        """Raises ConfigError for options that such experts cannot have."""
        check_split(neurons, self.sub_experts, self.num_inactive)
        check_solver(self.chosen_solver, self.solver_options)
        split_rows(1, self.heldout_ratio, 0)
        check_count("min_tokens", self.min_tokens)

    @property
    def num_inactive(self) -> int:
        return self.sub_experts - 1 if self.inactive is None else self.inactive

    @property
    def chosen_solver(self) -> str:
        return self.solver or DEFAULT

    @property
    def solver_options(self) -> dict[str, int]:
        return {} if self.restarts is None else {"restarts": self.restarts}

    def facts(self) -> dict[str, Any]:
        """Everything that a partition depends on, in JSON's types."""
        names = [field.name for field in dataclasses.fields(PartitionOptions)]
        chosen = {"inactive": self.num_inactive, "solver": self.chosen_solver}
        return {name: getattr(self, name) for name in names} | chosen


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
    Raises:
      ConfigError: bad options.
      OutputError: `work_dir` holds layers made with other settings.
    """
    options.check(source.neurons)
    threads = len(os.sched_getaffinity(0)) if threads is None else threads
    check_count("threads", threads)
    facts = {
        "layers": list(source.layers),
        "num_experts": source.num_experts,
        "neurons": source.neurons,
        "neuron_weighted": neuron_weights is not None,
        "fingerprint": fingerprint,
    }
    E = source.num_experts
    store = LayerStore(Path(work_dir), E, source.neurons, options.sub_experts)
    store.begin(options.facts() | facts)
    labels, rows, seconds = [], [], 0.0
    with (
        one_blas_thread(),
        ThreadPoolExecutor(threads) as pool,
        counter("experts partitioned", len(source.layers) * E) as count,
    ):
        for layer in source.layers:
            finished = store.read(layer)
            if finished is None:
                started = time.perf_counter()

                def one(expert: int, layer: int = layer):
                    weigh = neuron_weights and neuron_weights(layer, expert)
                    found = partition_expert(source, layer, expert, options, weigh)
                    count(1)
                    return found

                found = list(pool.map(one, range(E)))
                finished = (
                    np.stack([labels_F for labels_F, _ in found]),
                    [row for _, row in found],
                    time.perf_counter() - started,
                )
                store.write(layer, *finished)
            else:
                count(E)
            labels.append(finished[0])
            rows += finished[1]
            seconds += finished[2]
    return ModelPartition(np.stack(labels), rows, seconds)


def partition_expert(
    source: Source,
    layer: int,
    expert: int,
    options: PartitionOptions,
    neuron_weights_F: np.ndarray | None = None,
) -> tuple[np.ndarray, dict[str, Any]]:
    """Labels int16 [F] of one expert, and its row of the report.

    Rule for few tokens: with fewer than `min_tokens` fitted ones, or only zeros in
    them, nothing is solved; neurons are sorted by their weight (rule `neuron_weights`),
    or stay in the order they are stored if there is none (rule `contiguous`).
    """
    started = time.perf_counter()
    M_TF = source.activations(layer, expert)
    F, U = source.neurons, options.sub_experts
    fit, held = split_rows(max(len(M_TF), 1), options.heldout_ratio, options.seed)
    row = {"layer": layer, "expert": expert, "tokens": len(M_TF)}
    too_few = len(M_TF) == 0 or len(fit) < options.min_tokens
    if too_few or not M_TF[fit].any():
        mass_F = np.zeros(F) if neuron_weights_F is None else neuron_weights_F
        order = np.argsort(-np.asarray(mass_F), kind="stable")
        labels = np.empty(F, np.int64)
        labels[order] = np.repeat(np.arange(U), F // U)
        row["rule"] = "contiguous" if neuron_weights_F is None else "neuron_weights"
        partitions = {}
    else:
        weights_T = None
        if options.weigh_tokens:
            weights_T = np.asarray(source.gate_weights(layer, expert))[fit]
        problem = build_problem(
            M_TF[fit],
            U,
            options.num_inactive,
            normalise=options.normalise,
            neuron_weights_F=neuron_weights_F,
            token_weights_T=weights_T,
        )
        seed = _seed_of(options.seed, layer, expert)
        labels, _ = run_solver(
            problem, options.chosen_solver, seed, **options.solver_options
        )
        labels, row["rule"] = order_by_mass(problem.mass_F, labels, U), "solved"
        partitions = {name: run_solver(problem, name, seed)[0] for name in BASELINES}
    partitions = {"partition": labels} | partitions
    for part, rows in (("fitted", fit), ("heldout", held)):
        some = len(M_TF) and len(rows)
        row[part] = (
            qualities(M_TF[rows], partitions, U, options.num_inactive) if some else {}
        )
    row["seconds"] = time.perf_counter() - started
    return labels.astype(np.int16), row


def _seed_of(seed: int, layer: int, expert: int) -> int:
    """Another one for every expert, whatever the order they are solved in."""
    return int(np.random.SeedSequence([seed, layer, expert]).generate_state(1)[0])

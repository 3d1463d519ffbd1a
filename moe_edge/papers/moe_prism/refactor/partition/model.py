"""Partitions every expert of a model, streaming activations from disk.

Experts are independent, so each is read, solved and dropped; a few threads share the
cores. Finished layers are kept on disk: a call after a killed one goes on behind them.
"""

import dataclasses
import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from moe_edge.core.checks import OutputError
from moe_edge.core.files import write_text
from moe_edge.core.json_reader import LARGE_FILE_BYTES, read_json
from moe_edge.core.progress import counter
from moe_edge.papers.moe_prism.refactor.partition.alternate import one_blas_thread
from moe_edge.papers.moe_prism.refactor.partition.baselines import sorted_labels
from moe_edge.papers.moe_prism.refactor.partition.objective import (
    check_labels,
    qualities,
)
from moe_edge.papers.moe_prism.refactor.partition.problem import (
    build_problem,
    split_rows,
)
from moe_edge.papers.moe_prism.refactor.partition.solve import BASELINES, solve
from moe_edge.papers.moe_prism.refactor.settings import PartitionOptions

SETTINGS = "settings.json"


class LayerStore:
    """The folder `work_dir`: labels and rows of each finished layer."""

    def __init__(self, work_dir: Path, experts: int, neurons: int, subs: int):
        self._dir, self._shape, self._subs = work_dir, (experts, neurons), subs

    def begin(self, settings: dict[str, Any]) -> None:
        """Makes the folder, or refuses one that holds layers of other settings."""
        path = self._dir / SETTINGS
        if path.is_file():
            try:
                before = read_json(path, strict=False)
                differ = [n for n in settings if before.get(n) != settings[n]]
            except (ValueError, AttributeError) as error:
                raise OutputError(
                    f"{path} holds no settings; remove {self._dir}"
                ) from error
            if differ:
                raise OutputError(
                    f"{self._dir} holds layers made with another {', '.join(differ)}; "
                    "remove it or name another folder"
                )
        self._dir.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(settings, indent=1) + "\n")

    def _path(self, layer: int) -> Path:
        return self._dir / f"layer_{layer:03}.json"

    def write(self, layer: int, labels_EF, rows: list[dict], seconds: float) -> None:
        """Keeps a finished layer."""
        stored = {"labels": labels_EF.tolist(), "experts": rows, "seconds": seconds}
        write_text(self._path(layer), json.dumps(stored) + "\n")

    def read(self, layer: int) -> tuple[np.ndarray, list[dict], float] | None:
        """Labels int16 [E, F], rows and seconds; None if absent or damaged."""
        E, F = self._shape
        try:
            stored = read_json(
                self._path(layer), strict=False, max_bytes=LARGE_FILE_BYTES
            )
            rows, labels_EF = stored["experts"], np.array(stored["labels"])
            for labels_F in labels_EF:
                check_labels(labels_F, F, self._subs)
            if [row["expert"] for row in rows] != list(range(E)) or len(labels_EF) != E:
                return None
            return labels_EF.astype(np.int16), rows, float(stored["seconds"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None


class Source(Protocol):
    """What is read of a profile (`profile.reader.Profile` is one)."""

    layers: tuple[int, ...]
    num_experts: int
    neurons: int

    def activations(self, layer: int, expert: int) -> np.ndarray: ...

    def gate_weights(self, layer: int, expert: int) -> np.ndarray: ...


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
            "rules": dict(Counter(row["rule"] for row in self.experts)),
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
    neuron_weights: Mapping[int, np.ndarray] | None = None,
    fingerprint: str = "",
    threads: int | None = None,
) -> ModelPartition:
    """Cuts every expert of every layer; goes on where an earlier call stopped.

    Args:
      source: activations by layer and expert, float16 [T, F].
      work_dir: keeps `layer_LLL.json` of finished layers.
      options: how to cut.
      neuron_weights: layer -> float [E, F], such as norms of the down columns. Also
        decides for experts with too few tokens.
      fingerprint: of the source and the weights; part of what a resumed call checks.
      threads: experts at a time; None: the cores.
    Raises:
      ConfigError: bad options.
      OutputError: `work_dir` holds layers made with other settings.
    """
    options.check(source.neurons)
    E = source.num_experts
    facts = {
        "layers": list(source.layers),
        "num_experts": E,
        "neurons": source.neurons,
        "neuron_weighted": neuron_weights is not None,
        "fingerprint": fingerprint,
    }
    store = LayerStore(Path(work_dir), E, source.neurons, options.sub_experts)
    store.begin(options.facts() | facts)
    finished = []
    with (
        one_blas_thread(),
        ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool,
        counter("experts partitioned", len(source.layers) * E) as count,
    ):

        def one(layer: int, expert: int):
            weigh_F = None if neuron_weights is None else neuron_weights[layer][expert]
            found = partition_expert(source, layer, expert, options, weigh_F)
            count(1)
            return found

        for layer in source.layers:
            stored = store.read(layer)
            if stored is None:
                started = time.perf_counter()
                labels, rows = zip(*pool.map(one, [layer] * E, range(E)), strict=True)
                stored = np.stack(labels), list(rows), time.perf_counter() - started
                store.write(layer, *stored)
            else:
                count(E)
            finished.append(stored)
    labels, rows, seconds = zip(*finished, strict=True)
    return ModelPartition(np.stack(labels), sum(rows, []), sum(seconds))


def partition_expert(
    source: Source,
    layer: int,
    expert: int,
    options: PartitionOptions,
    neuron_weights_F: np.ndarray | None,
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
        unweighted = neuron_weights_F is None
        row["rule"] = "contiguous" if unweighted else "neuron_weights"
        labels = sorted_labels(np.zeros(F) if unweighted else neuron_weights_F, U)
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
        # Another one for every expert, whatever the order they are solved in.
        seeds = np.random.SeedSequence([options.seed, layer, expert])
        seed = int(seeds.generate_state(1)[0])
        given = options.solver_options
        labels = problem.ordered(solve(problem, options.chosen_solver, seed, **given))
        row["rule"] = "solved"
        partitions = {name: solve(problem, name, seed) for name in BASELINES}
    partitions = {"partition": labels} | partitions
    for part, rows in (("fitted", fit), ("heldout", held)):
        some = len(M_TF) and len(rows)
        row[part] = (
            qualities(M_TF[rows], partitions, U, options.num_inactive) if some else {}
        )
    row["seconds"] = time.perf_counter() - started
    return labels.astype(np.int16), row

"""Suite `refactor`: cutting experts into sub-experts, beside the paper's annealing.

A row's `ratio` is ours / peer, `bar` the ratio that is allowed and `limit_fraction`
ratio / bar: up to 1 the bar holds. All solvers of a round get the same problem.
"""

import dataclasses
import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from moe_edge.core.checks import CapacityError
from moe_edge.model.config import ModelConfig
from moe_edge.refactor.partition.alternate import (
    FIRST,
    WIDE,
    alternate,
    descend,
    one_blas_thread,
    random_partitions,
)
from moe_edge.refactor.partition.anneal import STEPS, anneal, anneal_numpy
from moe_edge.refactor.partition.problem import (
    Problem,
    build_problem,
    planted_activations,
)
from moe_edge.studies.speed.offload_rows import MS, make_row

SUBS = 4
WITHIN = 1.005  # of the annealer's objective
MAX_BATCHES = 16
MODEL_S, MODEL_BYTES = 300.0, 2e9  # allowed for the whole model
ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much the suite does; tests make it small.

    Attributes:
      tokens, neurons: of one expert.
      layers, experts: of the whole model.
      steps: of annealing.
      numpy_steps: of NumPy annealing that are run; its time is scaled to `steps`.
    """

    tokens: int = 2048
    neurons: int = 1024
    layers: int = 16
    experts: int = 64
    steps: int = STEPS
    numpy_steps: int = 20_000


def refactor_models(work_dir: Path) -> list[tuple[str, Path | ModelConfig]]:
    """None: the suite reads activations, no checkpoint."""
    return []


def refactor_suite(
    repeats: int, work_dir: Path, sizes: Sizes | None = None
) -> list[dict]:
    """All rows: one expert at `inactive` 2 and 3, a round's limit, the whole model.

    Args:
      repeats: measured rounds, each with activations and seed of its own.
      work_dir: of the synthetic activations, 4.3 GB.
      sizes: how much to do (None: `Sizes()`).
    """
    sizes = sizes or Sizes()
    rows = []
    for inactive in (2, 3):
        rows += expert_rows(inactive, sizes, repeats)
    return [*rows, round_row(sizes, repeats), *model_rows(work_dir, sizes)]


def expert_rows(inactive: int, sizes: Sizes, repeats: int) -> list[dict]:
    """Time to the annealer's objective, and the objective in the annealer's time.

    Both annealers walk the same path up to rounding, so the target is the jitted one's
    objective for both; what a NumPy step takes does not depend on how many there are.
    """
    _expert_round(inactive, sizes, 0)  # compiles
    rounds = [_expert_round(inactive, sizes, seed) for seed in range(repeats)]
    figures = {name: [r[name] for r in rounds] for name in rounds[0]}
    # Rounds whose time is a lower bound: the last batch was still above the target.
    not_reached = figures["reached"].count(False)
    case = f"{sizes.neurons} x {sizes.tokens}, {SUBS} subs, {inactive} inactive"
    steps = f"annealing, {sizes.steps} steps"
    ours = [MS * s for s in figures["ours_s"]]
    return [
        *(
            make_row(
                f"{case}, to within 0.5 % of {peer}",
                ours,
                [MS * s for s in figures[f"{peer.lower()}_s"]],
                f"{peer} {steps}",
                "ms",
                bar,
                not_reached=not_reached,
                numpy_steps=sizes.numpy_steps,
            )
            for peer, bar in (("NumPy", 1 / 50), ("jitted", 1 / 5))
        ),
        make_row(
            f"{case}, objective in its time",
            figures["same_time"],
            figures["annealed"],
            f"jitted {steps}",
            "sum |M|",
            1.0,
            seconds={n: figures[n] for n in ("same_time_s", "jitted_s")},
        ),
    ]


def _expert_round(inactive: int, sizes: Sizes, seed: int) -> dict[str, float]:
    M_TF, _ = planted_activations(sizes.tokens, sizes.neurons, seed=seed)
    problem = build_problem(M_TF, SUBS, inactive)
    started = time.perf_counter()
    labels_F = anneal(problem, seed=seed, steps=sizes.steps)
    jitted_s = time.perf_counter() - started
    annealed = problem.cost(labels_F)
    started = time.perf_counter()
    anneal_numpy(problem, seed=seed, steps=sizes.numpy_steps)
    numpy_s = (time.perf_counter() - started) * sizes.steps / sizes.numpy_steps
    ours_s, batch_s, reached = _time_to(problem, WITHIN * annealed, seed)
    batches = max(1, int(jitted_s / batch_s))
    _, history = alternate(problem, seed=seed, restarts=FIRST + WIDE * batches)
    # What stood when the annealer's time was over (or first, should that be later).
    in_time = [cost for at_s, cost in history if at_s <= jitted_s] or [history[0][1]]
    return {
        "jitted_s": jitted_s,
        "numpy_s": numpy_s,
        "annealed": annealed,
        "ours_s": ours_s,
        "reached": reached,
        "same_time": in_time[-1] * problem.unit,
        "same_time_s": history[len(in_time) - 1][0],
    }


def _time_to(
    problem: Problem, target: float, seed: int, max_batches: int = MAX_BATCHES
) -> tuple[float, float, bool]:
    """Seconds of one run until its best is `target` or less, and of its batches.

    Returns:
      seconds (of the longest run, a lower bound, if none gets there), mean seconds of a
      batch, and whether the target was reached.
    """
    batches = 1
    while True:
        _, history = alternate(
            problem, seed=seed, restarts=FIRST + WIDE * (batches - 1)
        )
        reached = [s for s, cost in history if cost * problem.unit <= target]
        if reached or batches >= max_batches:
            spent = history[-1][0]
            return (reached or [spent])[0], spent / batches, bool(reached)
        batches *= 2


def round_row(sizes: Sizes, repeats: int) -> dict:
    """One round of WIDE descents beside its operations at the matmul rate."""
    M_TF, _ = planted_activations(sizes.tokens, sizes.neurons)
    problem = build_problem(M_TF, SUBS, 2)
    rng = np.random.default_rng(0)
    labels_RF = random_partitions(rng, WIDE, sizes.neurons, SUBS)
    square = rng.random((2048, 2048), dtype=np.float32)
    ours_s, limit_s = [], []
    for measured in range(-1, repeats):
        started = time.perf_counter()
        with one_blas_thread():
            descend(problem, labels_RF, max_rounds=1)
        between = time.perf_counter()
        with one_blas_thread():
            square @ square
        rate = 2 * len(square) ** 3 / (time.perf_counter() - between)
        if measured >= 0:
            ours_s.append(between - started)
            limit_s.append(4 * problem.A_TF.size * SUBS * WIDE / rate)
    return make_row(
        f"one round of {WIDE} partitions",
        [MS * s for s in ours_s],
        [MS * s for s in limit_s],
        "its two products at the rate of a large one, one core",
        "ms",
    )


def model_rows(work_dir: Path, sizes: Sizes) -> list[dict]:
    """Seconds and peak memory of a process that partitions a whole model."""
    folder = write_activations(work_dir, sizes)
    results = work_dir / "partitions"
    shutil.rmtree(results, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "moe_edge.studies.speed.refactor_child",
        str(folder),
    ]
    command += [str(n) for n in (sizes.layers, sizes.experts, sizes.neurons)]
    done = subprocess.run(
        [*command, str(results)], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"partitioning {folder} failed: {done.stderr[-2000:]}")
    child = json.loads(done.stdout.splitlines()[-1])
    shape = f"{sizes.layers} x {sizes.experts} x {sizes.neurons} x {sizes.tokens}"
    case = f"whole model, {shape}"
    peak, bar = [child["peak_rss_bytes"] / 1e6], [MODEL_BYTES / 1e6]
    return [
        make_row(case, [child["seconds"]], [MODEL_S], "bar", "s", 1.0, **child),
        make_row(f"{case}, peak memory", peak, bar, "bar", "MB", 1.0),
    ]


def write_activations(work_dir: Path, sizes: Sizes) -> Path:
    """Synthetic activations of a whole model, float16, made where they lack.

    Raises:
      CapacityError: the disk has no room for them.
    """
    shape = (sizes.layers, sizes.experts, sizes.tokens, sizes.neurons)
    folder = Path(work_dir) / ("activations_" + "x".join(map(str, shape)))
    if folder.is_dir():
        return folder
    needed, free = 2 * math.prod(shape), shutil.disk_usage(work_dir).free
    if needed * 1.1 > free:
        raise CapacityError(
            f"synthetic activations take {needed / 1e9:.1f} GB, {work_dir} has "
            f"{free / 1e9:.1f} GB free; name another --work_dir"
        )
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for layer in range(sizes.layers):
        for expert in range(sizes.experts):
            M_TF, _ = planted_activations(
                sizes.tokens, sizes.neurons, seed=layer * sizes.experts + expert
            )
            path = partial / f"{layer:03}_{expert:03}.npy"
            np.save(path, M_TF.astype(np.float16), allow_pickle=False)
    partial.rename(folder)
    return folder

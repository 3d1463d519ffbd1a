"""Suite `refactor`: cutting experts into sub-experts, against the paper's annealing.

All solvers of a round get the same problem.
"""

import dataclasses
import math
import shutil
from pathlib import Path

import numpy as np

from moe_edge.bench.rounds import interleave_seconds, seconds_of, timed
from moe_edge.bench.speed import MS, Rows, SuiteSettings, make_row, speed_study
from moe_edge.core.checks import CapacityError
from moe_edge.core.npy import load_npy
from moe_edge.core.process import alone, peak_rss_bytes
from moe_edge.papers.moe_prism.refactor.partition.alternate import (
    FIRST,
    WIDE,
    alternate,
    descend,
    one_blas_thread,
    random_partitions,
)
from moe_edge.papers.moe_prism.refactor.partition.anneal import (
    STEPS,
    anneal,
    anneal_numpy,
)
from moe_edge.papers.moe_prism.refactor.partition.model import partition_model
from moe_edge.papers.moe_prism.refactor.partition.problem import (
    Problem,
    build_problem,
    planted_activations,
)
from moe_edge.papers.moe_prism.refactor.settings import PartitionOptions

SUBS = 4
WITHIN = 1.005  # of the annealer's objective
MAX_BATCHES = 16
MODEL_S, MODEL_BYTES = 300.0, 2e9  # allowed for the whole model
SYNTHETIC = (
    "Synthetic activations: planted clusters of neurons with log-normal scales. They "
    "show the solver's speed and objective, no model's quality."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RefactorSettings(SuiteSettings):
    """How much suite `refactor` does; `SuiteSettings` names the rest.

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


def refactor_rows(settings: RefactorSettings, work_dir: Path) -> Rows:
    """One expert at `inactive` 2 and 3, a round's limit, the whole model, whose
    synthetic activations take 4.3 GB of `work_dir`. Each round has its own seed."""
    rows = expert_rows(2, settings) + expert_rows(3, settings)
    return [*rows, round_row(settings), *model_rows(work_dir, settings)]


def expert_rows(inactive: int, sizes: RefactorSettings) -> Rows:
    """Time to the annealer's objective, and the objective in the annealer's time.

    Both annealers walk the same path up to rounding, so the target is the jitted one's
    objective for both; what a NumPy step takes does not depend on how many there are.
    """
    _expert_round(inactive, sizes, 0)  # compiles
    rounds = [_expert_round(inactive, sizes, seed) for seed in range(sizes.repeats)]
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
                "ms",
                peer=[MS * s for s in figures[f"{peer.lower()}_s"]],
                peer_name=f"{peer} {steps}",
                bar=bar,
                not_reached=not_reached,
                numpy_steps=sizes.numpy_steps,
            )
            for peer, bar in (("NumPy", 1 / 50), ("jitted", 1 / 5))
        ),
        make_row(
            f"{case}, objective in its time",
            figures["same_time"],
            "sum |M|",
            peer=figures["annealed"],
            peer_name=f"jitted {steps}",
            bar=1.0,
            seconds={n: figures[n] for n in ("same_time_s", "jitted_s")},
        ),
    ]


def _expert_round(
    inactive: int, sizes: RefactorSettings, seed: int
) -> dict[str, float]:
    M_TF, _ = planted_activations(sizes.tokens, sizes.neurons, seed=seed)
    problem = build_problem(M_TF, SUBS, inactive)
    labels_F, jitted_s = timed(lambda: anneal(problem, seed=seed, steps=sizes.steps))
    annealed = problem.cost(labels_F)
    numpy_s = seconds_of(
        lambda: anneal_numpy(problem, seed=seed, steps=sizes.numpy_steps)
    )
    ours_s, batch_s, reached = _time_to(problem, WITHIN * annealed, seed)
    batches = max(1, int(jitted_s / batch_s))
    _, history = alternate(problem, seed=seed, restarts=FIRST + WIDE * batches)
    # What stood when the annealer's time was over (or first, should that be later).
    in_time = [cost for at_s, cost in history if at_s <= jitted_s] or [history[0][1]]
    return {
        "jitted_s": jitted_s,
        "numpy_s": numpy_s * sizes.steps / sizes.numpy_steps,
        "annealed": annealed,
        "ours_s": ours_s,
        "reached": reached,
        "same_time": in_time[-1] * problem.unit,
        "same_time_s": history[len(in_time) - 1][0],
    }


def _time_to(
    problem: Problem, target: float, seed: int, max_batches: int = MAX_BATCHES
) -> tuple[float, float, bool]:
    """Seconds of one run until its best is `target` or less (a lower bound if none
    gets there), mean seconds of a batch, and whether the target was reached."""
    batches = 1
    while True:
        restarts = FIRST + WIDE * (batches - 1)
        _, history = alternate(problem, seed=seed, restarts=restarts)
        reached = [s for s, cost in history if cost * problem.unit <= target]
        if reached or batches >= max_batches:
            spent = history[-1][0]
            return (reached or [spent])[0], spent / batches, bool(reached)
        batches *= 2


def round_row(sizes: RefactorSettings) -> dict:
    """One round of WIDE descents against its operations at the matmul rate."""
    M_TF, _ = planted_activations(sizes.tokens, sizes.neurons)
    problem = build_problem(M_TF, SUBS, 2)
    rng = np.random.default_rng(0)
    labels_RF = random_partitions(rng, WIDE, sizes.neurons, SUBS)
    square = rng.random((2048, 2048), dtype=np.float32)
    cases = {
        "ours": lambda: descend(problem, labels_RF, max_rounds=1),
        "large": lambda: square @ square,
    }
    with one_blas_thread():
        runs = interleave_seconds(cases, sizes.repeats)
    share = 4 * problem.A_TF.size * SUBS * WIDE / (2 * len(square) ** 3)
    return make_row(
        f"one round of {WIDE} partitions",
        [MS * s for s in runs["ours"]],
        "ms",
        peer=[MS * share * s for s in runs["large"]],
        peer_name="its two products at the rate of a large one, one core",
    )


def model_rows(work_dir: Path, sizes: RefactorSettings) -> Rows:
    """Seconds and peak memory of a process that partitions a whole model."""
    path = write_activations(work_dir, sizes)
    results = work_dir / "partitions"
    shutil.rmtree(results, ignore_errors=True)
    child = alone(partition, path, results)
    shape = sizes.layers, sizes.experts, sizes.neurons, sizes.tokens
    case = f"whole model, {' x '.join(map(str, shape))}"
    bar, peak = {"peer_name": "bar", "bar": 1.0}, [child["peak_rss_bytes"] / 1e6]
    return [
        make_row(case, [child["seconds"]], "s", peer=[MODEL_S], **bar, **child),
        make_row(f"{case}, peak memory", peak, "MB", peer=[MODEL_BYTES / 1e6], **bar),
    ]


def write_activations(work_dir: Path, sizes: RefactorSettings) -> Path:
    """Synthetic activations of a whole model, float16 [L, E, T, F], made where they
    lack.

    Raises:
      CapacityError: the disk has no room for them.
    """
    shape = (sizes.layers, sizes.experts, sizes.tokens, sizes.neurons)
    path = Path(work_dir) / f"activations_{'x'.join(map(str, shape))}.npy"
    if path.is_file():
        return path
    needed, free = 2 * math.prod(shape), shutil.disk_usage(work_dir).free
    if needed * 1.1 > free:
        raise CapacityError(
            f"synthetic activations take {needed / 1e9:.1f} GB, {work_dir} has "
            f"{free / 1e9:.1f} GB free; name another --work_dir"
        )
    partial = path.with_suffix(".partial")
    M_LETF = np.lib.format.open_memmap(partial, "w+", np.float16, shape)
    for seed, at in enumerate(np.ndindex(*shape[:2])):
        M_LETF[at], _ = planted_activations(sizes.tokens, sizes.neurons, seed=seed)
    M_LETF.flush()
    return partial.rename(path)


class FileSource:
    """Activations [L, E, T, F] of a file, read as a profile's are."""

    def __init__(self, path: Path):
        self.path = path
        L, self.num_experts, _, self.neurons = self._open().shape
        self.layers = tuple(range(L))

    def _open(self) -> np.ndarray:
        return load_npy(self.path, mmap_mode="r")

    def activations(self, layer: int, expert: int) -> np.ndarray:
        # Opened each time: what has been read then counts no longer as our memory.
        return self._open()[layer, expert]

    def gate_weights(self, layer: int, expert: int) -> np.ndarray:
        return np.ones(len(self.activations(layer, expert)), np.float32)


def partition(path: Path, work_dir: Path) -> dict:
    """Partitions all experts on all of their tokens, with the default solver."""
    options = PartitionOptions(heldout_ratio=0.0)
    found = partition_model(FileSource(path), work_dir, options)
    return {
        "seconds": found.seconds,
        "peak_rss_bytes": peak_rss_bytes(),
        "experts": len(found.experts),
        "shares": found.summary()["shares"]["fitted"],
    }


STUDY = speed_study(
    "refactor",
    "How fast and how well are experts cut into sub-experts, against annealing?",
    refactor_rows,
    settings=RefactorSettings,
    limit=SYNTHETIC,
)

"""One entry to all solvers, by name."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from moe_edge.core.checks import ConfigError, check_known
from moe_edge.refactor.partition import anneal, baselines
from moe_edge.refactor.partition.alternate import alternate
from moe_edge.refactor.partition.objective import magnitudes, objective, order_by_mass
from moe_edge.refactor.partition.problem import Problem, build_problem


@dataclasses.dataclass(frozen=True)
class Partition:
    """What `solve` found.

    Attributes:
      labels: int64 [F], the sub-expert of each neuron, the most important one 0.
      objective: the paper's: sum of |M| over all rows that the inactive ones leave out.
      total: sum of |M|; objective / total is the share that is lost.
      solved: the objective that was minimised; the same unless weighted or normalised.
      seconds: of the solver, without checks and preparation.
      history: (seconds, `solved`) after each batch of restarts and at the end; one
        entry for other solvers.
      solver, seed: as given.
    """

    labels: np.ndarray
    objective: float
    total: float
    solved: float
    seconds: float
    history: tuple[tuple[float, float], ...]
    solver: str
    seed: int

    @property
    def share(self) -> float:
        """objective / total; 0 of nothing."""
        return self.objective / self.total if self.total > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class Solver:
    """A function of a problem, and the options it takes in addition."""

    function: Callable[..., Any]
    options: tuple[str, ...] = ()


_SCHEDULE = ("seed", "steps", "t0", "cooling", "cost_scale")
SOLVERS = {
    "alternate": Solver(alternate, ("seed", "restarts")),
    "anneal": Solver(anneal.anneal, _SCHEDULE),
    "anneal_numpy": Solver(anneal.anneal_numpy, _SCHEDULE),
    "greedy": Solver(baselines.greedy),
    "magnitude": Solver(baselines.magnitude),
    "contiguous": Solver(baselines.contiguous),
    "random": Solver(baselines.random, ("seed",)),
    "brute_force": Solver(baselines.brute_force),
}
BASELINES = ("random", "contiguous", "greedy", "magnitude")
DEFAULT = "alternate"


def check_solver(solver: str, options: dict[str, Any]) -> None:
    """Raises ConfigError for an unknown solver, or an option it does not take."""
    check_known("solver", solver, SOLVERS)
    known = [name for name in SOLVERS[solver].options if name != "seed"]
    for name in options:
        if name not in known:
            listed = ", ".join(known) or "none"
            raise ConfigError(
                f"solver {solver} has no option {name!r}; known: {listed}"
            )


def solve(
    M_TF,
    subs: int,
    inactive: int,
    *,
    solver: str = DEFAULT,
    seed: int = 0,
    normalise: bool = False,
    neuron_weights_F=None,
    token_weights_T=None,
    **options,
) -> Partition:
    """Cuts the neurons of an expert into equal sub-experts.

    Args:
      M_TF: activations [T, F]; only their magnitude counts.
      subs: sub-experts U, divides F.
      inactive: K of the objective, 1..subs-1: how many are left out.
      solver: of SOLVERS.
      seed: the same seed gives the same labels.
      normalise: divide every neuron by its mean magnitude before solving.
      neuron_weights_F, token_weights_T: factors before solving, after normalising.
      **options: of the solver, such as `restarts` or `steps`.
    Raises:
      ConfigError: bad input.
    """
    check_solver(solver, options)
    problem = build_problem(
        M_TF,
        subs,
        inactive,
        normalise=normalise,
        neuron_weights_F=neuron_weights_F,
        token_weights_T=token_weights_T,
    )
    started = time.perf_counter()
    labels, batches = run_solver(problem, solver, seed, **options)
    seconds = time.perf_counter() - started
    solved = problem.cost(labels)
    magnitude_TF = magnitudes(M_TF)
    return Partition(
        labels=order_by_mass(problem.mass_F, labels, subs),
        objective=objective(magnitude_TF, labels, subs, inactive),
        total=float(magnitude_TF.sum(dtype=np.float64)),
        solved=solved,
        seconds=seconds,
        history=batches or ((seconds, solved),),
        solver=solver,
        seed=seed,
    )


def run_solver(
    problem: Problem, solver: str, seed: int, **options
) -> tuple[np.ndarray, tuple[tuple[float, float], ...]]:
    """Labels in no order of importance, and the history if the solver keeps one."""
    chosen = SOLVERS[solver]
    if "seed" in chosen.options:
        options = options | {"seed": seed}
    found = chosen.function(problem, **options)
    if isinstance(found, tuple):
        labels, history = found
        return labels, tuple((at_s, cost * problem.unit) for at_s, cost in history)
    return found, ()

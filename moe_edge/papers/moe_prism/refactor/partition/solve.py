"""One entry to all solvers, by name."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from moe_edge.core.checks import ConfigError, check_known
from moe_edge.papers.moe_prism.refactor.partition import baselines
from moe_edge.papers.moe_prism.refactor.partition.alternate import alternate
from moe_edge.papers.moe_prism.refactor.partition.problem import Problem


@dataclasses.dataclass(frozen=True)
class Solver:
    """A function of a problem, and the options it takes in addition."""

    function: Callable[..., np.ndarray]
    options: tuple[str, ...] = ()


def _alternate(problem: Problem, **options) -> np.ndarray:
    return alternate(problem, **options)[0]


def _anneal(problem: Problem, **options) -> np.ndarray:
    from moe_edge.papers.moe_prism.refactor.partition import anneal

    return anneal.anneal(problem, **options)


def _anneal_numpy(problem: Problem, **options) -> np.ndarray:
    from moe_edge.papers.moe_prism.refactor.partition import anneal

    return anneal.anneal_numpy(problem, **options)


_SCHEDULE = ("seed", "steps", "t0", "cooling", "cost_scale")
SOLVERS = {
    "alternate": Solver(_alternate, ("seed", "restarts")),
    "anneal": Solver(_anneal, _SCHEDULE),
    "anneal_numpy": Solver(_anneal_numpy, _SCHEDULE),
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
    problem: Problem, solver: str = DEFAULT, seed: int = 0, **options
) -> np.ndarray:
    """Labels int64 [F] in no order of importance (see `Problem.ordered`).

    Args:
      solver: of SOLVERS.
      seed: the same seed gives the same labels.
      **options: of the solver, such as `restarts` or `steps`.
    Raises:
      ConfigError: see `check_solver`, or a value that the solver refuses.
    """
    check_solver(solver, options)
    chosen = SOLVERS[solver]
    if "seed" in chosen.options:
        options["seed"] = seed
    return chosen.function(problem, **options)

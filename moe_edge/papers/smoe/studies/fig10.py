"""SMoE, figure 10 and eq. 5: time per token over a, its fit, and the choice of a.

The whole of SMoE but CPU assist runs at each a over an emulated link; a least a is
chosen for a time budget, and the fidelity of every a stands next to its time.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.polynomial import Polynomial

from moe_edge.bench.cases import Case
from moe_edge.bench.engines import Bench
from moe_edge.bench.settings import Budget, Margin, Positive, Steps
from moe_edge.bench.study import Study
from moe_edge.bench.timed_cases import (
    LAYER,
    TIMING,
    TimedSettings,
    check_prompts,
    run_cases,
)
from moe_edge.core.checks import CapacityError
from moe_edge.engine.load import check_checkpoint
from moe_edge.metrics.frames import Rows, Tables, frame
from moe_edge.papers.smoe.choose_a import choose_a
from moe_edge.papers.smoe.studies.fig14 import smoe_steps

FASTER = "the largest a is faster than a = 0"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpotSettings(TimedSettings):
    """`TimedSettings` names the rest.

    Attributes:
      device_memory: budget of the experts.
      a_values: measured margins, at least `degree` + 2.
      assist: `two_pointer`, `fiddler` or None: the host's cores are the device's.
      tpot_budget_s: for which a is chosen; None: halfway between the extremes.
      degree: of the fitted polynomial.
    """

    rounds: int = 5
    prompt_tokens: int = 48
    new_tokens: Steps = 48
    fidelity_rows: int = 6
    device_memory: Budget = "25%"
    a_values: Sequence[Margin] = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    assist: str | None = None
    tpot_budget_s: Positive | None = None
    degree: int = 2

    def __post_init__(self):
        super().__post_init__()
        values = sorted(set(map(float, self.a_values)))
        object.__setattr__(self, "a_values", tuple(values))
        # Refuses too few points before anything is measured.
        choose_a(values, [1.0] * len(values), 1.0, degree=self.degree)


def cases_of(settings: TpotSettings) -> dict[tuple[int, float], Case]:
    """By batch size and a: SMoE with one margin for routing and for prefetching."""
    cases = {}
    for batch, a in itertools.product(settings.batches, settings.a_values):
        options = dataclasses.replace(smoe_steps(a)["+Pre"], assist=settings.assist)
        cases[batch, a] = Case(f"a={a:g}", settings.device_memory, batch, options)
    return cases


def check(settings: TpotSettings) -> None:
    """Refuses inputs and a budget that the checkpoint cannot run with."""
    check_prompts(settings)
    options = next(iter(cases_of(settings).values())).options
    options = dataclasses.replace(options, device_memory=settings.device_memory)
    room = {"batch": max(settings.batches), "capacity": None}
    check_checkpoint(settings.checkpoint, offload=options, **room)


def measure(settings: TpotSettings, rows: Rows) -> None:
    """Measures TPOT over a."""
    cases = cases_of(settings)
    with Bench(settings.checkpoint, settings=settings) as bench:
        timing = run_cases(bench, list(cases.values()), settings)
        timing.tell(rows, bench.model, settings)
    for (batch, a), case in cases.items():
        for number, tpot_s in enumerate(timing[case.key].tpot_s):
            rows("rounds", batch, a, number, tpot_s=tpot_s)
    for batch in settings.batches:
        asked = {"budget_s": settings.tpot_budget_s, "degree": settings.degree}
        rows("asked", batch, **asked)
    rows.about["baselines"] = ["resident", "a=0"]


def derive(tables: Tables) -> dict[str, Any]:
    """Eq. 5 on the rounds of every batch size, and the points beside it."""
    fits, curve, rounds = [], [], tables["rounds"]
    asked = tables["asked"].set_index("batch")
    for batch, some in rounds.groupby("batch", sort=False):
        budget_s = asked.get("budget_s", {}).get(batch)
        given = some.a.to_numpy(), some.tpot_s.to_numpy()
        fit = fit_of(*given, budget_s, int(asked.degree[batch]))
        curve += [
            {"batch": batch, "a": a, "what": what, "tpot_ms": 1e3 * tpot_s}
            for a, median_s in fit.pop("tpot_s").items()
            for what, tpot_s in (
                ("measured", median_s),
                ("fit", Polynomial(fit["coefficients"])(a)),
            )
        ]
        fits.append({"batch": batch, **fit})
    points = tables["timing"][tables["timing"].policy != "resident"].copy()
    points["a"] = points.policy.str.removeprefix("a=").astype(float)
    if "agreement" in points:
        points["agreement"] = points.agreement.fillna(1.0)  # lossless
    return {
        "fits": fits,
        "curve": curve,
        "points": points,
        "checks": {FASTER: all(fit["change"] < 0 for fit in fits)},
    }


def fit_of(
    a_N: np.ndarray, tpot_s_N: np.ndarray, budget_s: float | None, degree: int
) -> dict[str, Any]:
    """Eq. 5 on measured points, one a round or means over starts: the choice, a
    list that is empty if no a meets the budget.

    Without a budget it is halfway between the slowest and the fastest a.
    """
    median_s = {a: float(np.median(tpot_s_N[a_N == a])) for a in np.unique(a_N)}
    first_s, *_, last_s = median_s.values()  # by a, ascending
    budget_s = budget_s or (max(median_s.values()) + min(median_s.values())) / 2
    line = Polynomial.fit(a_N, tpot_s_N, 1)
    spread = float(np.var(tpot_s_N))
    left = float(np.mean((line(a_N) - tpot_s_N) ** 2))
    found = {
        "low": min(median_s),
        "high": max(median_s),
        "first_ms": 1e3 * first_s,
        "last_ms": 1e3 * last_s,
        "change": last_s / first_s - 1,
        "budget_ms": 1e3 * budget_s,
        "tpot_s": median_s,
        "linear_r2": 1 - left / spread if spread else 1.0,
    }
    try:
        choice = choose_a(a_N, tpot_s_N, budget_s, degree=degree)
    except CapacityError:
        fit = Polynomial.fit(a_N, tpot_s_N, degree).convert()
        nothing = {"choice": [], "is_certain": False}
        return found | nothing | {"coefficients": fit.coef.tolist()}
    told = {
        "a": choice.a,
        "predicted_ms": 1e3 * choice.predicted_tpot_s,
        "residual_ms": 1e3 * choice.max_residual_s,
    }
    return found | {
        "choice": [told],
        "is_certain": choice.is_certain,
        "coefficients": choice.coefficients,
    }


FRAMES = {
    "timing": TIMING,
    "layer": LAYER,
    "rounds": frame("batch a round", "tpot_s"),
    "asked": frame("batch", "budget_s degree"),
}
STUDY = Study(
    "smoe_fig10", TpotSettings, measure, FRAMES, derive, check=check, inline=True
)

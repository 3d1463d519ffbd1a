"""SMoE, figure 10 and eq. 5: time per token over a, its fit, and the choice of a.

The whole of SMoE but CPU assist runs at each a over an emulated link; a least a is
chosen for a time budget, and the fidelity of every a stands next to its time.
"""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.polynomial import Polynomial

from moe_edge.bench.cases import AHEAD_LIMIT, INLINE_LIMIT, LIMITS, Case
from moe_edge.bench.engines import Bench
from moe_edge.bench.prompts import prompt_files
from moe_edge.bench.rounds import interval_panel, median_panel
from moe_edge.bench.study import Claim, Findings, Study
from moe_edge.bench.timed_cases import Timed, TimedSettings, run_cases
from moe_edge.core.checks import CapacityError
from moe_edge.engine.load import check_checkpoint
from moe_edge.metrics.plots_panels import draw_panels
from moe_edge.metrics.results import metric
from moe_edge.papers.smoe.choose_a import choose_a
from moe_edge.papers.smoe.studies.fig14 import smoe_steps


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
    new_tokens: int = 48
    fidelity_rows: int = 6
    device_memory: str = "25%"
    a_values: Sequence[float] = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    assist: str | None = None
    tpot_budget_s: float | None = None
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
    prompt_files(settings)
    options = next(iter(cases_of(settings).values())).options
    options = dataclasses.replace(options, device_memory=settings.device_memory)
    room = {"batch": max(settings.batches), "capacity": None}
    check_checkpoint(settings.checkpoint, offload=options, **room)


def run(settings: TpotSettings) -> Findings:
    """Measures TPOT over a, fits it and chooses a for a budget."""
    cases = cases_of(settings)
    with Bench(settings.checkpoint) as bench:
        timing = run_cases(bench, list(cases.values()), settings)
    points = [point_of(a, timing[case.key]) for (_, a), case in cases.items()]
    fits = []
    for batch in settings.batches:
        mine = [point for point in points if point["batch"] == batch]
        a_N = np.repeat([point["a"] for point in mine], settings.rounds)
        tpot_s_N = np.concatenate([point["tpot_s"] for point in mine])
        fit = fit_of(a_N, tpot_s_N, settings.tpot_budget_s, settings.degree)
        fits.append({"batch": batch, **fit})
    told = ", ".join(f"batch {fit['batch']} {change(fit):+.0f} %" for fit in fits)
    return Findings(
        answer=f"With {settings.device_memory} of the experts on the device, TPOT from "
        f"the smallest to the largest a: {told}.",
        details=[f"{sentence(fit)}." for fit in fits],
        model=bench.model,
        workload=timing.ready.workload(settings),
        metrics=[*timing.rows(), *(row for fit in fits for row in fit_rows(fit))],
        limits=[
            *LIMITS,
            AHEAD_LIMIT,
            INLINE_LIMIT,
            "TPOT is of a step of the whole batch.",
        ],
        kind="emulated",
        baselines=["resident", "a=0"],
        checks=timing.checks()
        | {"the largest a is faster than a = 0": all(change(fit) < 0 for fit in fits)},
        ours={f"batch {fit['batch']}: r2 of a line": fit["linear_r2"] for fit in fits},
        plot=lambda path: plot(path, points, fits),
        files={"points.json": json.dumps({"points": points, "fits": fits}, indent=1)},
        summary={"points": points, "choice": fits},
    )


def point_of(a: float, timed: Timed) -> dict[str, Any]:
    """Time and fidelity at one a; a lossless case agrees, as its tokens showed."""
    found = timed.fidelity
    return {
        "batch": timed.case.batch,
        "a": a,
        "tpot_s": list(timed.tpot_s),
        "hit_ratio": timed.median("hit_ratio"),
        "agreement": found.agreement if found else 1.0,
        "agreement_interval95": found.agreement_interval95 if found else (1.0, 1.0),
        "perplexity_ratio": found.perplexity_ratio if found else 1.0,
    }


def fit_of(
    a_N: np.ndarray, tpot_s_N: np.ndarray, budget_s: float | None, degree: int
) -> dict[str, Any]:
    """Eq. 5 on measured points, one a round: the choice; `a` None if none meets it.

    Without a budget it is halfway between the slowest and the fastest a.
    """
    median_s = {a: float(np.median(tpot_s_N[a_N == a])) for a in np.unique(a_N)}
    budget_s = budget_s or (max(median_s.values()) + min(median_s.values())) / 2
    line = Polynomial.fit(a_N, tpot_s_N, 1)
    spread = float(np.var(tpot_s_N))
    left = float(np.mean((line(a_N) - tpot_s_N) ** 2))
    found = {
        "budget_tpot_s": budget_s,
        "tpot_s": median_s,
        "linear_r2": 1 - left / spread if spread else 1.0,
    }
    try:
        choice = choose_a(a_N, tpot_s_N, budget_s, degree=degree)
    except CapacityError as error:
        fit = Polynomial.fit(a_N, tpot_s_N, degree).convert()
        none = {"a": None, "predicted_tpot_s": None, "is_certain": False}
        return found | none | {"coefficients": fit.coef.tolist(), "reason": str(error)}
    names = ("a", "predicted_tpot_s", "coefficients", "max_residual_s", "is_certain")
    return found | {name: getattr(choice, name) for name in names}


def change(fit: dict[str, Any]) -> float:
    """Of TPOT from the smallest to the largest a, in %."""
    times_s = list(fit["tpot_s"].values())  # by a, ascending
    return 100 * (times_s[-1] / times_s[0] - 1)


def sentence(fit: dict[str, Any]) -> str:
    """The fit of a batch size in words."""
    by_a = list(fit["tpot_s"].items())
    (low, first_s), (high, last_s) = by_a[0], by_a[-1]
    text = (
        f"Batch {fit['batch']}: {1e3 * first_s:.1f} ms at a={low:g}, "
        f"{1e3 * last_s:.1f} ms at a={high:g} ({change(fit):+.0f} %); for "
        f"{1e3 * fit['budget_tpot_s']:.1f} ms "
    )
    if fit["a"] is None:
        return text + "no measured a is enough"
    certain = "" if fit["is_certain"] else ", within the fit's error"
    return text + f"the least a is {fit['a']:.2f}{certain}"


def fit_rows(fit: dict[str, Any]) -> list[dict]:
    """The metrics of a fit, as far as it has them."""
    return [
        metric(f"choice of a, batch {fit['batch']}", name, scale * fit[key], unit)
        for key, name, scale, unit in (
            ("budget_tpot_s", "TPOT budget", 1e3, "ms"),
            ("a", "chosen a", 1, "1"),
            ("predicted_tpot_s", "predicted TPOT", 1e3, "ms"),
            ("max_residual_s", "largest residual", 1e3, "ms"),
            ("linear_r2", "r2 of a straight line", 1, "1"),
        )
        if fit.get(key) is not None
    ]


def plot(path, points: list[dict], fits: list[dict]) -> None:
    """Time per step over a with its fit, and agreement; a column a batch size."""
    times, agreements = [], []
    for fit in fits:
        mine = [point for point in points if point["batch"] == fit["batch"]]
        title, a_N = f"batch {fit['batch']}", [point["a"] for point in mine]
        chosen = "none" if fit["a"] is None else f"{fit['a']:.2f}"
        fitted = Polynomial(fit["coefficients"])(np.asarray(a_N))
        measured = [point["tpot_s"] for point in mine]
        times.append(
            median_panel(
                f"{title}: least a within the budget: {chosen}",
                "TPOT (ms)",
                a_N,
                {"measured": measured, "fit": fitted[:, None]},
                1e3,
                x_label="a",
                level=("budget", 1e3 * fit["budget_tpot_s"]),
            )
        )
        agreed = [point["agreement"] for point in mine]
        intervals = [point["agreement_interval95"] for point in mine]
        agreements.append(
            interval_panel(title, "agreement", a_N, agreed, intervals, x_label="a")
        )
    panels = [*times, *agreements]
    draw_panels(path, panels, title="Time per step over a", columns=len(fits))


STUDY = Study(
    name="smoe_fig10",
    question="How does time per token fall with SMoE's a, and which a meets a budget "
    "(SMoE fig. 10, eq. 5)?",
    settings=TpotSettings,
    measure=run,
    check=check,
    inline=True,
    claim=Claim(
        source="SMoE, fig. 10, section V-C: TPOT falls generally linearly with alpha",
        paper={"shape": "linear fall"},
        why="The paper's figure shows an almost straight fall on three models of 16 to "
        "57 B parameters whose expert loads take one to two orders of magnitude longer "
        "than their compute. Here a load takes a stated number of layers of compute, "
        "and once nearly all low-score experts are replaced a larger a changes nothing "
        "more: the curve can flatten.",
    ),
)

"""OD-MoE, figure 3: recall by output-token index, by precision and alignment."""

import json
from collections.abc import Mapping, Sequence

import numpy as np

from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.metrics.results import Findings, metric
from moe_edge.papers.od_moe.shadow.predictor import Shadow
from moe_edge.papers.od_moe.studies.recorded import LIMITS, Recall, Runs, bar_checks
from moe_edge.papers.od_moe.studies.studies import Fig3Settings

ALIGNED = {  # name -> periods of token and KV cache
    "token and KV": (1, 1),
    "token only": (1, 0),
    "none": (0, 0),
}
BOTH, TOKEN, NONE = ALIGNED
SMOOTH = 8  # indexes of a point in the picture


def run(settings: Fig3Settings) -> Findings:
    """Records the model's runs and follows them with every shadow."""
    runs, precisions = Runs(settings), settings.precisions
    found = {
        (precision, name): runs.recall(Shadow(precision, *periods))
        for precision in precisions
        for name, periods in ALIGNED.items()
    }
    itself = runs.recall(Shadow("full")).overall
    return findings(runs, found, itself, precisions)


def findings(
    runs: Runs,
    found: Mapping[tuple[str, str], Recall],
    itself: float,
    precisions: Sequence[str],
) -> Findings:
    """The entry; `itself`: recall of the model as its own aligned shadow."""
    rows, overall = [], {}
    for (precision, name), one in found.items():
        policy = f"{precision}, aligned: {name}"
        overall[precision, name] = one.overall
        rows.append(one.row(policy, "recall"))
        first = one.by_index[:SMOOTH].mean()
        rows.append(metric(policy, f"recall, first {SMOOTH} tokens", first, "1"))
        rows.append(metric(policy, "recall, last eighth", one.last, "1"))
    aligned = {precision: overall[precision, BOTH] for precision in precisions}
    drifts = all(
        overall[p, BOTH] > overall[p, TOKEN] > overall[p, NONE] for p in precisions
    )
    curves = {
        f"{precision}, {name}": one.by_index.round(5).tolist()
        for (precision, name), one in found.items()
    }
    named = ", ".join(f"{p} {value:.4f}" for p, value in aligned.items())
    loose = ", ".join(f"{found[p, NONE].last:.2f}" for p in precisions)
    return Findings(
        answer=f"Aligned at every step: {named}; with tokens only "
        f"{overall[precisions[-1], TOKEN]:.3f} ({precisions[-1]}); never aligned they "
        f"end at {loose}.",
        model=runs.model,
        workload=runs.workload,
        metrics=rows,
        limits=LIMITS,
        checks={
            "the model as its own aligned shadow: recall exactly 1": itself == 1.0,
            **bar_checks(aligned),
            "token and KV > token only > none, at every precision": drifts,
        },
        ours={f"{p}, T1_KV1": value for p, value in aligned.items()}
        | {f"{p}, none": overall[p, NONE] for p in precisions},
        plot=lambda path: plot(path, found, precisions),
        summary={"recall": {f"{p}, {n}": v for (p, n), v in overall.items()}},
        files={"recall_by_index.json": json.dumps(curves) + "\n"},
    )


def plot(path, found: Mapping[tuple[str, str], Recall], precisions) -> None:
    """A panel a precision; points are means of neighbouring indexes."""
    panels = []
    for precision in precisions:
        series, x = {}, []
        for name in ALIGNED:
            curve = found[precision, name].by_index
            groups = np.array_split(curve, max(1, len(curve) // SMOOTH))
            series[name] = [float(np.nanmean(group)) for group in groups]
            x = np.cumsum([len(group) for group in groups]).tolist()
        panels.append(
            Panel(
                f"{precision} shadow",
                "recall of chosen experts",
                x,
                series,
                x_label=f"output token (means of {SMOOTH})",
            )
        )
    draw_panels(
        path, panels, title="Experts that a shadow names", columns=3, share_y=True
    )

"""OD-MoE, figure 3: recall by output-token index, by precision and alignment."""

from typing import Any

import numpy as np

from moe_edge.metrics.frames import Rows, Tables
from moe_edge.papers.od_moe.shadow.predictor import Shadow
from moe_edge.papers.od_moe.studies.recorded import Recall, Runs, bar_checks
from moe_edge.papers.od_moe.studies.studies import Fig3Settings

ALIGNED = {  # name -> periods of token and KV cache
    "token and KV": (1, 1),
    "token only": (1, 0),
    "none": (0, 0),
}
BOTH, TOKEN, NONE = ALIGNED
SMOOTH = 8  # indexes of a point in the picture


def measure(settings: Fig3Settings, rows: Rows) -> None:
    """Records the model's runs and follows them with every shadow."""
    runs = Runs(settings)
    for precision in settings.precisions:
        for name, periods in ALIGNED.items():
            tell(rows, precision, name, runs.recall(Shadow(precision, *periods)))
    itself = runs.recall(Shadow("full")).overall
    rows.checks["the model as its own aligned shadow: recall exactly 1"] = itself == 1.0
    rows.about |= {"model": runs.model, "workload": runs.workload}


def tell(rows: Rows, precision: str, aligned: str, found: Recall) -> None:
    """Adds a shadow's recall, in all and by index of the output token."""
    first = float(found.by_index[:SMOOTH].mean())
    more = {"first_8": first, "last_eighth": found.last}
    rows("recall", precision, aligned, recall=found.estimate, **more)
    for index, recall in enumerate(found.by_index.round(5), 1):
        if not np.isnan(recall):
            rows("indexes", precision, aligned, index, recall=recall)


def derive(tables: Tables) -> dict[str, Any]:
    """Recall aligned at every step and never; curves are means of neighbours."""
    recall, curve = tables["recall"], tables["indexes"]
    wide = recall.pivot(index="precision", columns="aligned", values="recall")
    drifts = (wide[BOTH] > wide[TOKEN]) & (wide[TOKEN] > wide[NONE])
    count = curve["index"].max()
    groups = np.array_split(np.arange(1, count + 1), max(1, count // SMOOTH))
    last = {index: group[-1] for group in groups for index in group}
    curve["upto"] = curve["index"].map(last)
    keys = ["precision", "aligned", "upto"]
    both = recall[recall.aligned == BOTH]
    checks = bar_checks(both.set_index("precision").recall.to_dict())
    drift = "token and KV > token only > none, at every precision"
    return {
        "aligned": both,
        "loose": recall[recall.aligned == NONE],
        "tokens_only": recall[recall.aligned == TOKEN].iloc[-1].to_dict(),
        "smooth": curve.groupby(keys, sort=False).recall.mean().reset_index(),
        "checks": checks | {drift: bool(drifts.all())},
    }

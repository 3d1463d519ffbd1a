"""OD-MoE, figure 6: recall over the periods of aligning tokens and KV cache."""

import itertools
from typing import Any

from moe_edge.metrics.frames import Rows, Tables
from moe_edge.papers.od_moe.shadow.predictor import Shadow
from moe_edge.papers.od_moe.studies.recorded import Runs
from moe_edge.papers.od_moe.studies.studies import Fig6Settings


def measure(settings: Fig6Settings, rows: Rows) -> None:
    """Follows the model's runs with every pair of periods."""
    runs, precision = Runs(settings), settings.precision
    for pair in itertools.product(settings.periods, repeat=2):
        rows("recall", *pair, recall=runs.recall(Shadow(precision, *pair)).estimate)
    workload = runs.workload | {"precision": precision}
    rows.about |= {"model": runs.model, "workload": workload}


def derive(tables: Tables) -> dict[str, Any]:
    """What the longest period of either costs."""
    recall = tables["recall"]
    by_pair = recall.set_index(["token", "kv"]).recall
    often, seldom = recall.token.min(), recall.token.max()
    best = by_pair[often, often]
    late_token, late_kv = by_pair[seldom, often], by_pair[often, seldom]
    return {
        "often": often,
        "seldom": seldom,
        "best": best,
        "kv_costs": best - late_kv,
        "token_costs": best - late_token,
        "checks": {
            "aligning both most often is best": bool(best >= by_pair.max()),
            "seldom tokens cost more than seldom KV": bool(late_token < late_kv),
        },
    }

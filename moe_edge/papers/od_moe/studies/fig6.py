"""OD-MoE, figure 6: recall over the periods of aligning tokens and KV cache."""

import itertools
from collections.abc import Mapping

from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.metrics.results import Findings
from moe_edge.papers.od_moe.shadow.predictor import Shadow
from moe_edge.papers.od_moe.studies.recorded import LIMITS, Recall, Runs
from moe_edge.papers.od_moe.studies.studies import Fig6Settings


def run(settings: Fig6Settings) -> Findings:
    """Follows the model's runs with every pair of periods."""
    runs, precision, periods = Runs(settings), settings.precision, settings.periods
    found = {
        pair: runs.recall(Shadow(precision, *pair))
        for pair in itertools.product(periods, repeat=2)
    }
    return findings(runs, found, precision, list(periods))


def name_of(pair) -> str:
    """As the paper writes it."""
    return "T{}_KV{}".format(*pair)


def findings(
    runs: Runs,
    found: Mapping[tuple[int, int], Recall],
    precision: str,
    periods: list[int],
) -> Findings:
    """The entry."""
    overall = {pair: one.overall for pair, one in found.items()}
    often, seldom = periods[0], periods[-1]
    best = max(overall, key=overall.get)
    late_token, late_kv = overall[seldom, often], overall[often, seldom]
    return Findings(
        answer=f"{name_of((often, often))} {overall[often, often]:.4f}; KV every "
        f"{seldom} costs {100 * (overall[often, often] - late_kv):.1f} points, tokens "
        f"every {seldom} {100 * (overall[often, often] - late_token):.1f}: tokens "
        "matter more.",
        model=runs.model,
        workload=runs.workload | {"precision": precision},
        metrics=[one.row(name_of(pair), "recall") for pair, one in found.items()],
        limits=LIMITS,
        checks={
            "aligning both most often is best": best == (often, often),
            "seldom tokens cost more than seldom KV": late_token < late_kv,
        },
        ours={name_of(pair): value for pair, value in overall.items()},
        plot=lambda path: plot(path, overall, precision, periods),
        summary={"recall": {name_of(pair): v for pair, v in overall.items()}},
    )


def plot(path, overall, precision: str, periods: list[int]) -> None:
    """A line for each token period."""
    series = {
        f"tokens every {token}": [overall[token, kv] for kv in periods]
        for token in periods
    }
    panel = Panel(
        f"{precision} shadow",
        "recall of chosen experts",
        periods,
        series,
        x_label="period of aligning the KV cache, decode steps",
        log_x=True,
    )
    draw_panels(path, [panel], title="Recall by alignment periods")

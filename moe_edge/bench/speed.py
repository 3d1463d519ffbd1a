"""What all speed suites share: rows that compare ours with a peer, and their entry.

A row's `ratio` is ours / peer, the median over rounds that were measured in turn. Where
a bar or a limit is set, `limit_fraction` is the share of it that was used: up to 1 the
bar holds.
"""

import dataclasses
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.bench.rounds import round_ratios
from moe_edge.bench.settings import StudySettings
from moe_edge.bench.study import Findings, Study
from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.rules import hf_shapes
from moe_edge.metrics.plots import benchmark_bars
from moe_edge.metrics.results import metric
from moe_edge.model.config import ModelConfig

MS = 1e3
KEYS = ("case", "ours", "peer", "unit", "ratio", "limit_fraction")  # of the last line
RANDOM = "Random weights: speed only, no quality claim. They route uniformly."
ONE_MACHINE = (
    "One machine; other programs may have shared it. Trust the ratios, which are "
    "medians over rounds measured in turn."
)
Rows = list[dict[str, Any]]
# Name, and Hugging Face folder or config, of each model that a suite measures.
Models = Sequence[tuple[str, Path | ModelConfig]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuiteSettings(StudySettings):
    """How long a speed suite runs.

    Attributes:
      repeats: measured rounds of every case.
      work_dir: where random checkpoints (up to 4 GB, of suite `large` 28) are made and
        kept for a next run; None: a temporary folder.
    """

    repeats: int = 5
    work_dir: str | None = None


def make_row(
    case: str,
    ours: Sequence[float],
    unit: str,
    *,
    peer: Sequence[float] | None = None,
    peer_name: str | None = None,
    bar: float | None = None,
    limit: float | None = None,
    **extra,
) -> dict[str, Any]:
    """One row of a suite.

    Args:
      case: what was measured.
      ours, peer: a figure a round.
      unit: of both.
      peer_name: whom or what ours is compared with.
      bar: largest ratio to the peer that is allowed.
      limit: largest median of ours that is allowed; kept as `bar` too.
      **extra: more of the row, for `benchmark.json`; `emulated=True` says that the case
        ran over an emulated link.
    """
    runs = {"ours": np.asarray(ours, float).tolist()}
    middle, ratio, fraction = statistics.median(runs["ours"]), None, None
    row = {"case": case, "ours": middle, "peer": None, "unit": unit}
    if peer is not None:
        runs["peer"] = np.asarray(peer, float).tolist()
        ratios = round_ratios(**runs)
        ratio = statistics.median(ratios)
        row |= {"peer": statistics.median(runs["peer"]), "peer_name": peer_name}
        row["round_ratios"] = ratios
    if limit is not None:
        fraction = middle / limit
    elif bar is not None:
        fraction = ratio / bar
    row |= {"bar": limit if bar is None else bar, "ratio": ratio}
    return {**row, "limit_fraction": fraction, "runs": runs, **extra}


def speed_study(
    name: str,
    question: str,
    rows_of: Callable[[Any, Path], Rows],
    models_of: Callable[[Any, Path], Models] = lambda settings, work_dir: (),
    *,
    settings: type = SuiteSettings,
    limit: str = RANDOM,
    answer: Callable[[Rows], str] | None = None,
    **further,
) -> Study:
    """The study `benchmark_NAME`.

    Args:
      rows_of: measures; takes the settings and the folder for random checkpoints.
      models_of: the models that it measured; takes the same.
      question, settings, **further: as in `Study`.
      limit: what the suite's figures do not show.
      answer: rows -> the entry's answer; None: `answer_of`.
    """

    def measure(given: SuiteSettings) -> Findings:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(given.work_dir or temporary)
            folder.mkdir(parents=True, exist_ok=True)
            rows = rows_of(given, folder)
            model = describe_models(models_of(given, folder))
        print(table_of(rows))
        words = (answer or answer_of)(rows)
        return findings_of(name, rows, model, given.repeats, limit, words)

    return Study(
        name=f"benchmark_{name}",
        question=question,
        settings=settings,
        measure=measure,
        **further,
    )


def findings_of(
    name: str, rows: Rows, model: dict, repeats: int, limit: str, answer: str
) -> Findings:
    """What suite `name` found."""
    is_emulated = any(row.get("emulated") for row in rows)
    peers = {row["peer_name"] for row in rows if row["peer"] is not None}
    builds = {
        row["peer_name"]: row["peer_build"] for row in rows if "peer_build" in row
    }
    shown = [{key: row[key] for key in KEYS} for row in rows]
    return Findings(
        answer=answer,
        details=[f"{sentence(row)}." for row in rows],
        model=model,
        workload={"suite": name, "repeats": repeats, "peers": builds},
        metrics=[found for row in rows for found in metrics_of(row)],
        limits=[limit, ONE_MACHINE],
        plot=lambda path: benchmark_bars(path, rows, f"Speed suite `{name}`"),
        kind="emulated" if is_emulated else "measured",
        baselines=sorted(peers),
        files={"benchmark.json": json.dumps(rows, indent=1, default=float) + "\n"},
        summary={"suite": name, "rows": shown},
    )


def answer_of(rows: Rows) -> str:
    """All ratios and bars in one sentence."""
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    used = [row["limit_fraction"] for row in rows if row["bar"] is not None]
    parts = [f"{len(rows)} cases"]
    if ratios:
        parts.append(
            f"ours / peer is {min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)}, "
            f"median {statistics.median(ratios):.2f}"
        )
    if used:
        held = sum(share <= 1 for share in used)
        parts.append(f"{held} of {len(used)} stay within their bar")
    return "; ".join(parts) + "."


def sentence(row: dict[str, Any]) -> str:
    """A row in a few words."""
    text = f"{row['case']}: {row['ours']:.3g} {row['unit']}"
    if "over_bound" in row:
        return f"{text} ({row['over_bound']:.2f}x its bound)"
    return text if row["ratio"] is None else f"{text} ({row['ratio']:.2f}x the peer)"


def metrics_of(row: dict[str, Any]) -> list[dict]:
    """Metrics of a row for the results entry."""
    case, unit, n = row["case"], row["unit"], len(row["runs"]["ours"])
    found = [metric("ours", case, row["ours"], unit, n)]
    if row["peer"] is not None:
        found.append(metric(row["peer_name"], case, row["peer"], unit, n))
        spread = ("half range", float(np.ptp(row["round_ratios"])) / 2)
        found.append(metric("ours / peer", case, row["ratio"], "1", n, spread))
    for name, unit in (("limit_fraction", "1"), ("peak_rss_bytes", "bytes")):
        if row.get(name) is not None:
            found.append(metric(name, case, row[name], unit, n))
    return found


def describe_models(models: Models) -> dict[str, Any]:
    """`model` of the results entry; of several, the name lists their parameters."""
    if not models:
        return {"name": "no model", "params": 0, "weights": "none"}
    params = {}
    for name, source in models:
        is_config = isinstance(source, ModelConfig)
        shapes = hf_shapes(source if is_config else open_checkpoint(source).config)
        params[name] = sum(map(math.prod, shapes.values()))
    weights = "random" if "default" not in params else "random, but for default"
    if len(params) == 1:
        ((name, count),) = params.items()
        return {"name": name, "params": count, "weights": weights}
    listed = ", ".join(f"{name} ({n / 1e6:.1f} M)" for name, n in params.items())
    return {"name": listed, "params": 0, "weights": weights}


def table_of(rows: Rows) -> str:
    """One line a case, for people."""
    line = "{:34}{:>10}{:>10}  {:9}{:>7}{:>10}"
    lines = [line.format("case", "ours", "peer", "unit", "ratio", "of limit")]
    for row in rows:
        shown = [
            "-" if row[key] is None else form.format(row[key])
            for key, form in (
                ("ours", "{:.1f}"),
                ("peer", "{:.1f}"),
                ("unit", "{}"),
                ("ratio", "{:.2f}x"),
                ("limit_fraction", "{:.0%}"),
            )
        ]
        lines.append(line.format(row["case"], *shown))
    return "\n".join(lines)

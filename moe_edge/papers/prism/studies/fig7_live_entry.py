"""The entry of `prism_fig7_live`: the runs of each seed, compared."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from moe_edge.bench.rounds import round_order
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.metrics.results import Findings, metric
from moe_edge.papers.prism.studies import fig7
from moe_edge.papers.prism.studies.fig7_live import (
    PARTS,
    WITHOUT,
    Changed,
    Figure7Live,
    changed,
    write_prompts,
)
from moe_edge.papers.prism.studies.live_entry import live_findings
from moe_edge.papers.prism.studies.live_seeds import served
from moe_edge.papers.prism.studies.served import median_row, percent

MOVING, OTHERWISE = "while blocks move", "otherwise"
TAIL_BAR = 2.0  # p99 of a token while blocks move, over that of others
MS = 1e3


@dataclasses.dataclass(frozen=True)
class Compared:
    """All runs of all seeds.

    Attributes:
      runs: by variant, one a seed; the first variant moves nothing.
    """

    runs: Mapping[str, Sequence[Changed]]

    @property
    def moving(self) -> list[str]:
        """Variants with migration, the paper's first."""
        return [name for name in self.runs if name != WITHOUT]

    def means(self, variant: str, key: str) -> np.ndarray:
        """float64 [seeds]: of `Changed.means`."""
        return np.array([one.means()[key] for one in self.runs[variant]])

    def median(self, variant: str, key: str) -> float:
        return float(np.median(self.means(variant, key)))

    def ratio(self, variant: str, part: str) -> np.ndarray:
        """float64 [seeds]: mean time of requests over that without migration."""
        key = f"seconds {part}"
        return self.means(variant, key) / self.means(WITHOUT, key)

    def counts(self, variant: str, name: str) -> list[float]:
        """A count of `Changed`, of every seed."""
        return [float(getattr(one, name)) for one in self.runs[variant]]

    def tails_ms(self) -> dict[str, float]:
        """p99 of a decoded token, where there are tokens: with migration, without."""
        moving = [one for name in self.moving for one in self.runs[name]]
        tokens = {
            MOVING: [s for one in moving for s in one.during_s],
            OTHERWISE: [s for one in moving for s in one.others_s],
            WITHOUT: [s for one in self.runs[WITHOUT] for s in one.others_s],
        }
        return {
            name: MS * float(np.quantile(found, 0.99))
            for name, found in tokens.items()
            if found
        }


def measure(settings: Figure7Live) -> Findings:
    """All runs of every seed, taking turns in being first; the answer."""
    variants = settings.variants()
    runs: dict[str, list[Changed]] = {name: [] for name in variants}
    all_facts = []
    with settings.folder() as folder:
        for seed in settings.all_seeds:
            prompts = folder / f"prompts_{seed}.jsonl"
            write_prompts(settings, seed, prompts)
            for name in round_order(list(variants), seed - settings.seed):
                where = folder / f"seed_{seed}_{name.replace(' ', '_')}"
                options = settings.run(seed, str(prompts), variants[name])
                facts = served(where, f"seed {seed}, {name}", options)
                runs[name].append(changed(settings, where, facts))
                all_facts.append(facts)
    return findings(settings, Compared(runs), all_facts)


def findings(
    settings: Figure7Live, compared: Compared, facts: Sequence[Mapping]
) -> Findings:
    """The entry of some runs."""
    moving, tails = compared.moving, compared.tails_ms()
    first, key = moving[0], "local after"
    change = {name: percent(compared.ratio(name, "all")) for name in moving}
    told = "No token came while blocks moved."
    tail = tails[MOVING] / tails[OTHERWISE] if MOVING in tails else None
    if tail is not None:
        told = (
            f"A token's p99 is {tails[MOVING]:.0f} ms while blocks move, "
            f"{tails[OTHERWISE]:.0f} ms otherwise and {tails[WITHOUT]:.0f} ms in runs "
            "without migration."
        )
    return live_findings(
        settings,
        facts,
        answer="Migration changes a request's mean time by "
        + ", ".join(f"{change[name]} ({name})" for name in moving)
        + f" (paper {fig7.PAPER['change']}); at home after the change: "
        + ", ".join(
            f"{100 * compared.median(name, key):.0f} % ({name})"
            for name in compared.runs
        )
        + ".",
        details=[*(_line(name, compared) for name in moving), told],
        workload={"arrivals": "all at once", "first placement": "uniform frequencies"},
        metrics=metrics_of(compared, tails),
        limits=[
            "Few requests; spreads are over seeds of requests. Tails are of all seeds' "
            "tokens together.",
        ],
        baselines=[WITHOUT],
        checks={
            "blocks moved in every run with migration, in none without": not any(
                compared.counts(WITHOUT, "moved")
            )
            and all(min(compared.counts(name, "moved")) > 0 for name in moving),
            f"target: a token's p99 while blocks move is at most {TAIL_BAR:g} times "
            "that of others": tail is not None and tail <= TAIL_BAR,
        }
        | {
            f"target: {name}, after the change, {better}": bool(holds.all())
            for name in moving
            for better, holds in {
                "computes more at home": compared.means(name, key)
                > compared.means(WITHOUT, key),
                "is faster": compared.ratio(name, "after") < 1,
            }.items()
        },
        ours={
            "without migration, s": round(compared.median(WITHOUT, "seconds all"), 4),
            "with, s": round(compared.median(first, "seconds all"), 4),
            "change": change[first],
        }
        | {f"change, {name}": change[name] for name in moving[1:]},
        plot=lambda path: plot(path, compared.runs),
        files=curves(compared.runs),
        summary={"change": change, "tail": tail},
    )


def _line(name: str, compared: Compared) -> str:
    """What migration by one rule did."""
    migrations, moved, moving_s = (
        float(np.median(compared.counts(name, count)))
        for count in ("migrations", "moved", "moving_s")
    )
    return (
        f"{name}: {percent(compared.ratio(name, 'before'))} before the change, "
        f"{percent(compared.ratio(name, 'after'))} after it; {migrations:.0f} "
        f"migrations moved {moved:.0f} blocks in {moving_s:.1f} s."
    )


def metrics_of(compared: Compared, tails: Mapping[str, float]) -> list[dict]:
    """Rows of the entry."""
    rows = []
    for name in compared.runs:
        for key, label, unit in (
            ("seconds", "time of a request", "s"),
            ("local", "local ratio", "1"),
        ):
            for part in PARTS:
                found = compared.means(name, f"{key} {part}")
                rows.append(median_row(name, f"{label}, {part}", found, unit))
    for name in compared.moving:
        for part in PARTS:
            found = compared.ratio(name, part)
            rows.append(median_row(name, f"time over {WITHOUT}, {part}", found, "1"))
        for label, count in (("migrations", "migrations"), ("moved blocks", "moved")):
            found = compared.counts(name, count)
            rows.append(median_row(name, label, found, "1"))
    for name, ms in tails.items():
        policy, label = (name, OTHERWISE) if name == WITHOUT else ("migration", name)
        rows.append(metric(policy, f"p99 of a decoded token, {label}", ms, "ms"))
    return rows


def by_number(runs: Sequence[Changed], name: str) -> list[float]:
    """Mean over servers and seeds of each request in a server's order."""
    tables = [getattr(one, name) for one in runs]
    return np.mean(np.concatenate(tables), axis=0).round(6).tolist()


CURVES = {"local_NR": "computed locally", "seconds_NR": "time of a request (s)"}


def curves(runs: Mapping[str, Sequence[Changed]]) -> dict[str, str]:
    """The file with all curves, request by request."""
    found = {
        name: {variant: by_number(some, name) for variant, some in runs.items()}
        for name in CURVES
    }
    return {"curves.json": json.dumps(found, indent=1) + "\n"}


def plot(path: Path, runs: Mapping[str, Sequence[Changed]]) -> None:
    """Local ratio and time, request by request."""
    panels = []
    for name, y_label in CURVES.items():
        series = {variant: by_number(some, name) for variant, some in runs.items()}
        count = len(series[WITHOUT])
        title = f"data changes after request {count // 2}"
        numbers = list(range(1, count + 1))
        x_label = "request of a server"
        panels.append(Panel(title, y_label, numbers, series, x_label=x_label))
    draw_panels(path, panels, title="The data of three live servers changes")

"""The entry of `prism_fig7_live`: two runs of each seed, compared."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.metrics.results import Findings, metric
from moe_edge.studies.prism import fig7
from moe_edge.studies.prism.fig7_live import (
    PARTS,
    WITH,
    WITHOUT,
    Changed,
    Figure7Live,
    changed,
    write_prompts,
)
from moe_edge.studies.prism.live_entry import live_findings
from moe_edge.studies.prism.live_seeds import served
from moe_edge.studies.prism.served import median_row, percent
from moe_edge.studies.rounds import round_order

MOVING, OTHERWISE = "while blocks move", "otherwise"
TAIL_BAR = 2.0  # p99 of a token while blocks move, over that of others
MS = 1e3


def measure(settings: Figure7Live) -> Findings:
    """Both runs of every seed, taking turns in being first; the answer."""
    runs: dict[str, list[Changed]] = {WITHOUT: [], WITH: []}
    all_facts = []
    with settings.folder() as folder:
        for seed in settings.all_seeds:
            prompts = folder / f"prompts_{seed}.jsonl"
            write_prompts(settings, seed, prompts)
            for variant in round_order(list(runs), seed - settings.seed):
                where = folder / f"seed_{seed}_{variant.replace(' ', '_')}"
                options = settings.run(seed, str(prompts), variant)
                facts = served(where, f"seed {seed}, {variant}", options)
                runs[variant].append(changed(settings, where, facts))
                all_facts.append(facts)
    return findings(settings, runs, all_facts)


def findings(
    settings: Figure7Live,
    runs: Mapping[str, Sequence[Changed]],
    facts: Sequence[Mapping],
) -> Findings:
    """The entry of some runs."""
    means = {name: [one.means() for one in by_seed] for name, by_seed in runs.items()}
    both = list(zip(means[WITH], means[WITHOUT], strict=True))
    ratios = {
        part: np.array([a[f"seconds {part}"] / b[f"seconds {part}"] for a, b in both])
        for part in PARTS
    }
    tails = tail_ms(runs)
    local = {
        name: float(np.median([one["local after"] for one in by_seed]))
        for name, by_seed in means.items()
    }
    moved = [one.moved for one in runs[WITH]]
    tail = tails[MOVING] / tails[OTHERWISE] if len(tails) > 2 else None
    told = "no token came while blocks moved"
    if tail is not None:
        told = (
            f"a token's p99 is {tails[MOVING]:.0f} ms while blocks move, "
            f"{tails[OTHERWISE]:.0f} ms otherwise and {tails[WITHOUT]:.0f} ms in runs "
            "without migration"
        )
    return live_findings(
        settings,
        facts,
        answer=f"Migration changes a request's mean time by "
        f"{percent(ratios['all'])} (paper {fig7.PAPER['change']}); after the "
        f"data change {100 * local[WITH]:.0f} instead of {100 * local[WITHOUT]:.0f} % "
        "of pairs are at home.",
        details=[
            f"Before the change {percent(ratios['before'])}, after it "
            f"{percent(ratios['after'])}.",
            f"{np.median([one.migrations for one in runs[WITH]]):.0f} migrations moved "
            f"{np.median(moved):.0f} blocks in "
            f"{np.median([one.moving_s for one in runs[WITH]]):.1f} s; {told}.",
        ],
        workload={"arrivals": "all at once", "first placement": "uniform frequencies"},
        metrics=metrics_of(runs, means, ratios, tails),
        limits=[
            "Few requests; spreads are over seeds of requests. Tails are of all seeds' "
            "tokens together.",
        ],
        baselines=[WITHOUT],
        checks={
            "blocks moved in every run with migration, in none without": min(moved) > 0
            and not any(one.moved for one in runs[WITHOUT]),
            f"target: a token's p99 while blocks move is at most {TAIL_BAR:g} times "
            "that of others": tail is not None and tail <= TAIL_BAR,
            "target: after the change more is computed at home with migration": (
                all(a["local after"] > b["local after"] for a, b in both)
            ),
            "target: after the change requests are faster with migration": bool(
                (ratios["after"] < 1).all()
            ),
        },
        ours={
            "without migration, s": _median(means[WITHOUT], "seconds all"),
            "with, s": _median(means[WITH], "seconds all"),
            "change": percent(ratios["all"]),
            "change before": percent(ratios["before"]),
            "change after": percent(ratios["after"]),
        },
        plot=lambda path: plot(path, runs),
        files=curves(runs),
        summary={"change": percent(ratios["all"]), "tail": tail},
    )


def _median(rows: Sequence[Mapping[str, float]], key: str) -> float:
    return round(float(np.median([row[key] for row in rows])), 4)


def tail_ms(runs: Mapping[str, Sequence[Changed]]) -> dict[str, float]:
    """p99 of a decoded token in milliseconds, where there are tokens."""
    tokens = {
        MOVING: [s for one in runs[WITH] for s in one.during_s],
        OTHERWISE: [s for one in runs[WITH] for s in one.others_s],
        WITHOUT: [s for one in runs[WITHOUT] for s in one.others_s],
    }
    return {
        name: MS * float(np.quantile(found, 0.99))
        for name, found in tokens.items()
        if found
    }


def metrics_of(runs, means, ratios, tails) -> list[dict]:
    """Rows of the entry."""
    rows = []
    for name, by_seed in means.items():
        for measure_of, unit in (("seconds", "s"), ("local", "1")):
            label = "time of a request" if unit == "s" else "local ratio"
            for part in PARTS:
                found = [one[f"{measure_of} {part}"] for one in by_seed]
                rows.append(median_row(name, f"{label}, {part}", found, unit))
    for part in PARTS:
        label = f"time over no migration, {part}"
        rows.append(median_row(WITH, label, ratios[part], "1"))
    for label, of in (("migrations", "migrations"), ("moved blocks", "moved")):
        found = [float(getattr(one, of)) for one in runs[WITH]]
        rows.append(median_row(WITH, label, found, "1"))
    for name, ms in tails.items():
        policy, label = (name, OTHERWISE) if name == WITHOUT else (WITH, name)
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
        count = len(series[WITH])
        title = f"data changes after request {count // 2}"
        numbers = list(range(1, count + 1))
        x_label = "request of a server"
        panels.append(Panel(title, y_label, numbers, series, x_label=x_label))
    draw_panels(path, panels, title="The data of three live servers changes")

"""The runs of `prism_fig7_live`: every seed, with migration and without."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.bench.rounds import round_order
from moe_edge.metrics.frames import Rows, Tables, of_seeds
from moe_edge.papers.prism.studies import live_entry
from moe_edge.papers.prism.studies.fig7_live import (
    PARTS,
    WITHOUT,
    Changed,
    Figure7Live,
    changed,
    write_prompts,
)
from moe_edge.papers.prism.studies.live_seeds import served

MOVING, OTHERWISE = "while blocks move", "otherwise"
TAIL_BAR = 2.0  # p99 of a token while blocks move, over that of others
TAIL = f"target: a token's p99 while blocks move is at most {TAIL_BAR:g} times that of "
MOVED = "blocks moved in every run with migration, in none without"


def measure(settings: Figure7Live, rows: Rows) -> None:
    """All runs of every seed, taking turns in being first."""
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
    tell(rows, runs)
    more = {"arrivals": "all at once", "first placement": "uniform frequencies"}
    live_entry.tell(rows, settings, all_facts, more)
    rows.about["baselines"] = [WITHOUT]


def tell(rows: Rows, runs: Mapping[str, Sequence[Changed]]) -> None:
    """Adds all runs; the first variant moves nothing. Times are compared within
    seeds; tails are of all seeds' tokens together."""
    for name, by_seed in runs.items():
        for part in PARTS:
            seconds, local, base = (
                np.array([one.means()[f"{what} {part}"] for one in some])
                for what, some in (
                    ("seconds", by_seed),
                    ("local", by_seed),
                    ("seconds", runs[WITHOUT]),
                )
            )
            found = {"seconds": seconds, "local": local}
            if name != WITHOUT:
                found["over"] = seconds / base
                better = {"is faster": found["over"] < 1}
                local_base = [one.means()[f"local {part}"] for one in runs[WITHOUT]]
                better["computes more at home"] = local > np.array(local_base)
                for what, holds in better.items() if part == "after" else ():
                    target = f"target: {name}, after the change, {what}"
                    rows.checks[target] = bool(holds.all())
            medians = {what: of_seeds(each) for what, each in found.items()}
            rows("parts", name, part, **medians)
        counts = {"migrations": "migrations", "moved": "moved", "moving_s": "moving_s"}
        if name != WITHOUT:
            of = {k: [float(getattr(r, v)) for r in by_seed] for k, v in counts.items()}
            rows("moves", name, **{k: of_seeds(v) for k, v in of.items()})
        tables = {
            what: np.concatenate([getattr(one, f"{what}_NR") for one in by_seed])
            for what in ("seconds", "local")
        }
        means = {what: found.mean(axis=0).round(6) for what, found in tables.items()}
        for request in range(len(means["local"])):
            given = {what: mean_R[request] for what, mean_R in means.items()}
            rows("requests", name, request + 1, **given)
    moving = [one for name, some in runs.items() if name != WITHOUT for one in some]
    rows.checks[MOVED] = all(one.moved for one in moving) and not any(
        one.moved for one in runs[WITHOUT]
    )
    for who, when, tokens_s in (
        ("migration", MOVING, [s for one in moving for s in one.during_s]),
        ("migration", OTHERWISE, [s for one in moving for s in one.others_s]),
        (WITHOUT, OTHERWISE, [s for one in runs[WITHOUT] for s in one.others_s]),
    ):
        if tokens_s:
            rows("tokens", who, when, p99_ms=1e3 * float(np.quantile(tokens_s, 0.99)))


def derive(tables: Tables) -> dict[str, Any]:
    """Changes of a request's time, and the tail of a token while blocks move."""
    parts, p99 = tables["parts"], tables["tokens"]
    parts["change"] = parts.over - 1
    changed = parts[parts.over.notna()]
    tails = {
        name: p99[(p99.who == who) & (p99.when == when)].p99_ms
        for name, who, when in (
            ("moving", "migration", MOVING),
            ("otherwise", "migration", OTHERWISE),
            ("without", WITHOUT, OTHERWISE),
        )
    }
    tails = {name: found.iloc[0] for name, found in tails.items() if len(found)}
    ratio = tails["moving"] / tails["otherwise"] if "moving" in tails else None
    return {
        "changes": changed[changed.part == "all"],
        "before": changed[changed.part == "before"],
        "after": changed[changed.part == "after"],
        "home": parts[parts.part == "after"],
        "tails": tails,
        "half": tables["requests"].request.max() // 2,
        "checks": {TAIL + "others": ratio is not None and ratio <= TAIL_BAR},
    }

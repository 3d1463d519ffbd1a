"""Starts: a study in fresh processes, a round each.

Rounds of one process share its compiled programs, its memory and its hour, so their
spread says too little. A start has a process, an order and prompts of its own; one
that others disturbed is repeated. Where they are kept: `starts_file.py`; what they say
together: `joined.py`.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_edge.bench.started import started
from moe_edge.bench.starts_file import Start, read_kept, read_starts, stored_text
from moe_edge.bench.study import Study
from moe_edge.core.checks import ConfigError
from moe_edge.core.files import write_text
from moe_edge.core.json_reader import as_read_back
from moe_edge.core.process import CpuUse, alone
from moe_edge.metrics.frames import INTERVAL, Estimate, Frame, Rows, plain
from moe_edge.metrics.machine import git_state

MOST_OTHERS = 0.1  # of the processors
TRIES = 3  # of a start
Run = Callable[[str, Any, int], Mapping[str, Any]]


class Plan(NamedTuple):
    """Which starts an entry is to have.

    Attributes:
      made: all tries so far.
      until: the number of starts in the end.
      kept: file beside the entry, of a run that is under way; None keeps nothing.
      added_to: tries of the entry that it adds to.
    """

    made: Sequence[Start]
    until: int
    kept: Path | None = None
    added_to: int = 0


def planned(
    study: Study, settings: Any, out_dir: str | Path, count: int, append: bool
) -> Plan:
    """`count` starts, after those of the entry with `append`. A run that was cut off
    goes on: what it had measured is kept beside the entry until that is written, and
    counts towards the number that is asked for now.

    Raises:
      ConfigError: starts to add to are not there, or were made with other settings or
        by a version with other rows; or what is kept was to be added to others than the
        entry's, or to none.
    """
    entry = Path(out_dir).resolve()
    kept = entry.with_name(f"{entry.name}.starts.partial")
    going_on = kept.is_file()
    made, added_to = [], 0
    if going_on:
        made, added_to = read_kept(kept, study, settings, f"remove {kept.name}")
        if append != bool(added_to):
            raise ConfigError(
                f"{kept} is of a run {'with' if added_to else 'without'} --append that "
                f"was cut off; give it as then to go on, or remove {kept.name}"
            )
    before = read_starts(entry, study, settings) if append else []
    if going_on and made[:added_to] != before:
        raise ConfigError(
            f"{kept} adds to starts that {entry.name} no longer has; remove {kept.name}"
        )
    until = next_number(before) + count
    if going_on:
        print(f"{kept}: goes on after {len(used(made))} of {until} starts")
    return Plan(made or before, until, kept, len(before))


def next_number(starts: Sequence[Start]) -> int:
    """Of a further start."""
    return 1 + max((start["number"] for start in starts), default=-1)


def of_start(study: Study, settings: Any, number: int) -> Any:
    """The settings of a start, cut to the study's or to what was given where that is
    less; those with a seed take another in each, unless the study keeps it.

    Raises:
      ConfigError: a study that cannot be measured in starts.
    """
    if not study.frames:
        raise ConfigError(
            f"study {study.name} keeps no rows, so --starts cannot join them; leave it "
            "out"
        )
    known = {field.name for field in dataclasses.fields(settings)}
    if unknown := study.start.keys() - known:
        raise ConfigError(
            f"study {study.name} has no {', '.join(sorted(unknown))} to cut in a "
            "start; leave --starts out"
        )
    cut = {
        name: min(most, getattr(settings, name))
        for name, most in study.start.items()
        if most is not None
    }
    if "seed" in known - study.start.keys():
        cut["seed"] = settings.seed + number
    return dataclasses.replace(settings, **cut)


def run_start(name: str, settings: Any, number: int) -> dict[str, Any]:
    """Measures a study as start `number`, with the settings of one, in a process of
    its own."""
    from moe_edge.bench.registry import find  # which imports the driver

    study = find(name)
    if study.inline:
        from moe_edge.engine.inline import run_inline

        run_inline()
    rows = Rows(study.frames)
    with started(number):
        study.measure(settings, rows)
    return kept(rows)


def kept(rows: Rows) -> dict[str, Any]:
    """What a start leaves: of every measure its observations."""
    frames = {
        name: [_kept_row(rows.frames[name], row) for row in found]
        for name, found in rows.rows.items()
        if found
    }
    said = {"checks": rows.checks, "about": rows.about, "files": rows.files}
    return as_read_back({"frames": frames} | said)


def _kept_row(declared: Frame, row: Mapping[str, Any]) -> dict[str, Any]:
    values, within = {}, {}
    for measure in declared.units:
        given = row.get(measure)
        if isinstance(given, Estimate):
            values[measure] = list(given.values) or [float(given.value)]
            if given.kind == INTERVAL:
                beside = given.value - given.low, given.high - given.value
                within[measure] = [float(width) for width in beside]
        elif given is not None:
            values[measure] = [float(given)]
    keys = [plain(row[key]) for key in declared.keys]
    return {"keys": keys, "values": values, "within": within}


def take_starts(
    study: Study,
    settings: Any,
    plan: Plan,
    run: Run | None = None,
) -> list[Start]:
    """The starts of a plan, those that were made before first.

    Args:
      run: what measures a start; None: `run_start` in a fresh process.
    """
    run = run or (lambda *args: alone(run_start, *args))
    found = list(plan.made)
    while (number := next_try(found)) < plan.until:
        one = _taken(study, settings, number, run)
        found.append(one)
        if plan.kept:
            write_text(plan.kept, stored_text(settings, found, plan.added_to))
        others = "unknown" if one["others"] is None else f"{one['others']:.0%}"
        print(f"start {number}: {one['wall_s']:.0f} s, others' CPU {others}")
    return found


def next_try(found: Sequence[Start]) -> int:
    """The number of the start to make after these tries: the last one's again, if
    others disturbed it and it has tries left."""
    number = next_number(found)
    tries = sum(start["number"] == number - 1 for start in found)
    again = found and found[-1]["busy"] and tries < TRIES
    return number - 1 if again else number


def _taken(study: Study, settings: Any, number: int, run: Run) -> Start:
    """A start, and day, commit and load."""
    began_s, load, use = time.time(), os.getloadavg()[0], CpuUse.now()
    measured = run(study.name, of_start(study, settings, number), number)
    others = use.others(CpuUse.now()) if use else None
    facts = {
        "number": number,
        "started_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began_s)),
        "wall_s": round(time.time() - began_s, 1),
        "commit": git_state()["commit"],
        "load_before": round(load, 2),
        "others": None if others is None else round(others, 3),
        "busy": others is not None and others > MOST_OTHERS,
    }
    return facts | dict(measured)


def used(starts: Sequence[Start]) -> list[Start]:
    """Of each number the last try."""
    return list({start["number"]: start for start in starts}.values())


def facts_of(starts: Sequence[Start]) -> list[dict[str, Any]]:
    """What an entry says of each try: all but what was measured."""
    measured = ("frames", "checks", "about", "files")
    last = {id(start) for start in used(starts)}
    return [
        {key: value for key, value in start.items() if key not in measured}
        | {"used": id(start) in last}
        for start in starts
    ]

"""Stored entries in frames: their pages say what their rows say, and nothing else."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import jinja2.meta
import pytest

from moe_edge.bench.registry import find
from moe_edge.bench.starts_file import FILE, read_starts
from moe_edge.metrics.frames import plain, tables
from moe_edge.metrics.index import find_entries
from moe_edge.metrics.page import TABLE_ROWS, environment, render, template_path
from moe_edge.metrics.report import entry_page
from moe_edge.metrics.schema import ROWS_VERSION, read_result

RESULTS = Path(__file__).parents[2] / "results"
FOLDERS = {
    folder.name: folder
    for folder in find_entries(RESULTS)
    if read_result(folder)["schema_version"] == ROWS_VERSION
}


@functools.cache
def entry(name):
    return read_result(FOLDERS[name])


def derived(name, frames):
    numbers = plain(find(entry(name)["study"]).derive(tables(frames)))
    return numbers.pop("checks", {}), numbers


def test_docs_say_how_many_starts_entries_have_and_of_which_days():
    text = (RESULTS.parent / "docs" / "use.md").read_text()
    rows = re.findall(r"^\| (\w+) \| (\d+) \| ([\d, -]+) \| [^|]+ \|$", text, re.M)
    told = {name: (int(count), days) for name, count, days in rows}
    for name in FOLDERS:
        each = entry(name).get("starts", {"each": []})["each"]
        starts = [start["started_utc"][:10] for start in each if start["used"]]
        days = ", ".join(sorted(set(starts)))
        if starts or name in told:
            assert told.get(name) == (len(starts), days or "-"), name


STARTED = [name for name, folder in FOLDERS.items() if (folder / FILE).is_file()]


@pytest.mark.parametrize("name", STARTED)
def test_starts_can_be_added_to_an_entry(name):
    """Though its study has settings now that it had not then."""
    study = find(entry(name)["study"])
    stored = json.loads((FOLDERS[name] / FILE).read_text())
    given = stored["settings"] | {"data_dir": "elsewhere"}
    known = {field.name for field in dataclasses.fields(study.settings)}
    settings = study.settings(**{key: given[key] for key in known & given.keys()})
    assert read_starts(FOLDERS[name], study, settings) == stored["starts"]


def approx(value):
    """Equal but for the last digits, which other versions of pandas may round."""
    if isinstance(value, dict):
        return {key: approx(item) for key, item in value.items()}
    if isinstance(value, list):
        return [approx(item) for item in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


@pytest.mark.parametrize("name", FOLDERS)
def test_page_and_numbers_are_those_of_the_rows(name):
    result = entry(name)
    checks, numbers = derived(name, result["frames"])
    assert approx(numbers) == approx(result["numbers"])
    assert checks.items() <= result["checks"].items()
    page = (FOLDERS[name] / "README.md").read_text()
    assert page == entry_page(FOLDERS[name], result)
    lines = page.split("\n")
    for number, line in enumerate(lines):
        if line.startswith("| ---"):
            rows = [one for one in lines[number + 1 :][:60]]
            end = next(i for i, one in enumerate(rows) if not one.startswith("|"))
            assert end <= TABLE_ROWS
    declared = find(result["study"]).frames
    for frame, stored in result["frames"].items():
        assert tuple(stored["keys"]) == declared[frame].keys
        assert stored["units"].items() <= declared[frame].units.items()


@pytest.mark.parametrize("name", FOLDERS)
def test_each_number_is_used_and_each_name_is_there(name):
    path = template_path(entry(name)["study"])
    jinja, named = environment(path.parent), set()
    parsed = jinja.parse(path.read_text())
    for part in (path.name, *jinja2.meta.find_referenced_templates(parsed)):
        source, *_ = jinja.loader.get_source(jinja, part)
        named |= jinja2.meta.find_undeclared_variables(jinja.parse(source))
    named -= {"figure", "table", "workload", "machine", "model", "starts"}
    numbers = set(entry(name)["numbers"])
    declared = set(find(entry(name)["study"]).frames)
    assert named <= numbers | declared
    assert numbers <= named, numbers - named


# Measures that a page leaves to result.json.
UNSEEN: dict[str, set[str]] = {
    "better_together": {
        "points.agreement",
        "points.moved",
        "points.slots",
    },
    "coserve_fig1": {
        "networks.record_bytes",
    },
    "coserve_fig11": {
        "needed.all_experts",
    },
    "coserve_fig13": {
        "runs.over_least",
    },
    "coserve_fig13_live": {
        "runs.management_ratio",
        "runs.scheduling_ratio",
        "runs.time_s",
    },
    "coserve_fig15_live": {
        "runs.management_ratio",
        "runs.scheduling_ratio",
        "runs.time_s",
    },
    "coserve_fig15": {
        "runs.over_least",
    },
    "coserve_fig5": {
        "networks.load_host_ms",
        "networks.record_bytes",
    },
    "coserve_sensitivity": {
        "runs.over_least",
    },
    "od_moe_table2": {
        "speeds.output",
        "speeds.over_resident",
    },
    "smoe_fig10": {
        "layer.layer_ms",
        "timing.hit_ratio",
        "timing.host_ms",
        "timing.link_ms",
        "timing.moved_mb",
        "timing.wait_ms",
    },
    "smoe_fig12": {
        "layer.layer_ms",
        "timing.agreement",
        "timing.host_ms",
        "timing.link_ms",
        "timing.moved_mb",
        "timing.perplexity_ratio",
        "timing.wait_ms",
    },
    "smoe_fig14": {
        "layer.layer_ms",
        "timing.agreement",
        "timing.host_ms",
        "timing.link_ms",
        "timing.moved_mb",
        "timing.perplexity_ratio",
        "timing.wait_ms",
    },
    "prism_fig6": {
        "ratios.before",
        "ratios.migrations",
    },
    "prism_fig7": {
        "runs.local",
        "runs.new_data_s",
        "runs.over_new",
        "runs.seeds",
        "servers.seconds",
    },
    "prism_fig7_live": {
        "parts.over",
    },
    "prism_sensitivity": {
        "methods.mean_s",
        "over.seeds",
    },
    "prism_table2": {
        "methods.local",
        "servers.seconds",
    },
}


def shown(result):
    """All that a reader sees: the text, and what pictures draw."""
    text, figures = render(result["study"], result)
    return text, json.dumps(figures.drawn, default=str)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_a_changed_row_changes_the_page(name):
    """One of five rows of every measure, with its bounds, multiplied by 1.5."""
    assert unseen(name) == UNSEEN.get(name, set())


def unseen(name):
    """Measures of which neither text nor picture shows a row."""
    result, found = entry(name), set()
    text = json.dumps(result["frames"])
    # What the rows give here: another processor's last digits are no change.
    before = shown({**result, "numbers": derived(result["study"], json.loads(text))[1]})
    for frame, stored in result["frames"].items():
        for place, measure in enumerate(stored["units"], len(stored["keys"])):
            rows = [row for row in stored["rows"] if row[place] is not None]
            some = (*rows[:2], rows[len(rows) // 3], rows[len(rows) // 2], rows[-1])
            if not any(differs(result, text, frame, place, r, before) for r in some):
                found.add(f"{frame}.{measure}")
    return found


def differs(result, text, frame, place, row, before):
    """Whether the page shows that a row is another one."""
    frames = json.loads(text)
    (same,) = [one for one in frames[frame]["rows"] if one == row][:1]
    cell = same[place]
    if isinstance(cell, list):
        for end in (0, 2, 3):  # the value and its bounds
            cell[end] = 1.5 * cell[end] + 1e-6
    else:
        same[place] = 1.5 * cell + 1e-6
    try:
        checks, numbers = derived(result["study"], frames)
        changed = {**result, "frames": frames, "numbers": numbers}
        return (
            shown(changed) != before or not checks.items() <= result["checks"].items()
        )
    except (ValueError, KeyError, IndexError):
        return True  # it fails: that is seen, too

"""The days of an entry: what each side's starts alone would be, side by side."""

import json
import re
import shutil

import pytest

from moe_edge.bench import joined
from moe_edge.bench.days import compare_days, entry_of, main, read_days, table
from moe_edge.metrics.again import compare
from moe_edge.metrics.index import find_entries
from moe_edge.metrics.machine import REPOSITORY
from moe_edge.metrics.schema import read_result

RESULTS = REPOSITORY / "results"
ENTRY = RESULTS / "smoe_ttft"
FIRST, SECOND = "2026-11-28", "2026-11-29"


@pytest.fixture
def few_draws(monkeypatch):
    """Bounds of a short bootstrap."""
    monkeypatch.setattr(joined, "RESAMPLES", 40)


@pytest.fixture
def made(tmp_path, few_draws):
    """Copies of an entry whose last starts are its first ones, of another day, `slow`
    times as long."""

    def make(name, before=3, last=2, slow=1.0):
        folder = tmp_path / name
        shutil.copytree(ENTRY, folder)
        stored = json.loads((folder / "starts.json").read_text())
        first = json.dumps(stored["starts"][:before])
        stored["starts"] = json.loads(first)
        for start in json.loads(first)[:last]:
            start["number"] += before
            start["started_utc"] = f"{SECOND}T00:00:00Z"
            start["commit"] = "0123456789"
            for row in start["frames"]["waits"]:
                row["values"]["ttft_s"] = [
                    slow * one for one in row["values"]["ttft_s"]
                ]
            stored["starts"].append(start)
        (folder / "starts.json").write_text(json.dumps(stored))
        return folder

    return make


def test_all_starts_together_give_the_entry():
    days, result = read_days(ENTRY), read_result(ENTRY)
    assert list(days.starts)[:2] == [FIRST, SECOND]
    again = entry_of(days, [start for side in days.sides for start in side])
    found = compare(result, again)
    assert found.equal and not (found.within or found.outside or found.loose)
    intervals = again["starts"]["intervals"]
    for name, bounds in result["starts"]["intervals"].items():
        assert intervals[name] == pytest.approx(bounds), name


def test_a_day_that_gives_the_same_again_repeats(made, capsys):
    assert main([str(made("entry"))]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"entry: starts, 3 of {FIRST}, 2 of {SECOND}"
    assert said[1].startswith("note: of commit ") and said[1].endswith("again 01234567")
    assert said[-1] == "repeats"


def test_a_day_of_longer_times_does_not_repeat(made, capsys):
    """Ratios of these times stay, and so do bytes."""
    folder = made("entry", slow=3.0)
    assert main([str(folder)]) == 1
    assert "does not repeat: " in capsys.readouterr().out.splitlines()[-1]
    outside = compare_days(read_days(folder)).outside
    assert outside and all(name.endswith(": ttft_s") for name in outside)


def test_the_last_day_is_held_against_all_before(made):
    folder = made("entry", before=4)
    path = folder / "starts.json"
    stored = json.loads(path.read_text())
    stored["starts"][0]["started_utc"] = "2026-11-27T23:59:59Z"
    stored["starts"].append(stored["starts"][-1])  # a start that was tried again
    path.write_text(json.dumps(stored))
    before, last = read_days(folder).sides
    assert [start["number"] for start in before] == [0, 1, 2, 3]
    assert [start["number"] for start in last] == [4, 5]


def test_the_table_names_each_entry_of_two_days(made, capsys):
    folders = [made("far", slow=3.0), made("same"), made("few", last=1)]
    folders += [made("one_day", last=0), RESULTS / "coserve_fig11", RESULTS]
    assert main(["--table", *map(str, folders)]) == 0
    *_, far, few, same, both = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"\| `far` \| 3 / 2 \| \d+ / \d+ \| \d+ / 0 \| \d+ / 0 \| 6\d% \| \d+% \| "
        r"no: \d+ of \d+ values lie outside, times outside \+\d+% to \+\d+% \|",
        far,
    )
    assert few == f"| `few` | 3 / 1 | | | | | | not judged: 1 start of {SECOND} |"
    assert re.fullmatch(
        r"\| `same` \| 3 / 2 (\| \d+ / 0 ){3}(\| \d+% ){2}\| yes \|", same
    )
    assert both.startswith("| all |  | ") and both.endswith(" |  |  | 1 of 2 |")
    assert list(table([]))[1:] == ["| all |  | 0 / 0 | 0 / 0 | 0 / 0 |  |  | 0 of 0 |"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"last": 0},
            f"entry has starts of {FIRST} alone; measure more on another day",
        ),
        ({"last": 1}, f"entry has 1 start of {SECOND}, expected 2 or more on either"),
        ({"before": 1, "last": 1}, f"entry has 1 start of {FIRST}, expected 2 or more"),
    ],
)
def test_too_few_starts_are_refused(made, given, message):
    with pytest.raises(SystemExit, match=f"error: {message}"):
        main([str(made("entry", **given))])


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("result.json", '"study": "smoe_ttft"', '"study": "other"', "study.*'other'"),
        ("starts.json", '"frames": {', '"frame": {', "holds no starts that smoe_ttft"),
        ("starts.json", f'"{FIRST}T', '"soon', "holds no starts that smoe_ttft can"),
        ("starts.json", "{", "[", "starts.json"),
    ],
)
def test_what_cannot_be_read_is_refused(made, file, old, new, message):
    path = made("entry") / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        main([str(path.parent)])


def test_entries_without_starts_are_refused(made):
    with pytest.raises(SystemExit, match="coserve_fig11 keeps no starts, which only"):
        main([str(RESULTS / "coserve_fig11")])
    folder = made("entry")
    (folder / "starts.json").unlink()
    with pytest.raises(SystemExit, match="entry keeps no starts, which only --starts"):
        main([str(folder)])


def test_a_table_of_a_folder_that_is_not_there_is_refused():
    with pytest.raises(SystemExit, match="error: no-such-entry does not exist"):
        main(["--table", "no-such-entry"])


def test_docs_have_a_row_of_each_entry_of_two_days():
    text = (REPOSITORY / "docs" / "limits.md").read_text()
    told = dict(re.findall(r"^ *\| `(\w+)` \| (\d+ / \d+) \|", text, re.MULTILINE))
    for folder in find_entries(RESULTS):
        each = read_result(folder).get("starts", {"each": []})["each"]
        days = [one["started_utc"][:10] for one in each if one["used"]]
        if len(set(days)) > 1:
            last = days.count(max(days))
            assert told.get(folder.name) == f"{len(days) - last} / {last}", folder.name

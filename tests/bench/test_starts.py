"""Starts of a study of no cost: what each keeps, and what they say together."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_edge.bench import starts
from moe_edge.bench.joined import join
from moe_edge.bench.registry import find
from moe_edge.bench.rounds import round_order
from moe_edge.bench.started import start_number, started
from moe_edge.bench.starts import Plan, kept, of_start, take_starts, used
from moe_edge.bench.study import Study, run_study
from moe_edge.core.checks import ConfigError
from moe_edge.core.process import CpuUse
from moe_edge.metrics import page
from moe_edge.metrics.frames import Rows, frame, interval, median
from moe_edge.metrics.schema import read_result, validate_entry
from tests.support.entries import row_of

TEMPLATE = """# Is b faster than a?

**Change of the time: b {{ change | f("+.0%") }}, c {{ slow | f("+.0%") }}.**

Over a: {{ changes | say("{policy} {over:x.2f}") }}; less 1
{{ (changes[0].over - 1) | f("+.0%") }}.

{{ figure(timing, x="policy", y={"ms": "time (ms)"}, series="", title="t") }}

Of {{ policies }} policies. Starts: {{ starts }}.

{{ table(changes, "policy", {"change": "change"}, digits="+.0%") }}

{{ table(changes, "policy", {"over": "over a"}, digits="x.2f") }}
"""
NOISE = {"a": (10.0, 11.0, 9.0, 10.5, 9.5), "b": (10.2, 10.6, 9.4, 10.1, 9.9)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much.

    Attributes:
      rounds: how often; seed: of the requests.
    """

    rounds: int = 3
    seed: int = 7


def measure(settings: Size, rows: Rows) -> None:
    number = start_number()
    for policy in ("a", "b", "c"):
        base = NOISE["a"][number % 5]
        ms = {"a": base, "b": NOISE["b"][number % 5], "c": 2 * base}[policy]
        rows("timing", policy, ms=median([ms] * settings.rounds), same=1.0)
    rows.about |= {
        "model": {"name": "none", "params": 0, "weights": "none"},
        "workload": {"seed": settings.seed},
    }
    rows.checks["it ran"] = number != 3


def derive(tables) -> dict[str, Any]:
    ms = tables["timing"].set_index("policy").ms
    change = ms / ms["a"] - 1
    rows = [
        {"policy": p, "change": change[p], "over": change[p] + 1} for p in ("b", "c")
    ]
    found = {"change": change["b"], "slow": change["c"], "changes": rows}
    return found | {"policies": len(ms)}


STUDY = Study(
    name="tiny",
    settings=Size,
    frames={"timing": frame("policy", ms="ms", same="1")},
    measure=measure,
    derive=derive,
)


def here(name, settings, number):
    """A start in this process."""
    rows = Rows(STUDY.frames)
    with started(number):
        STUDY.measure(settings, rows)
    return kept(rows)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """The study's page, and starts in this process."""
    (tmp_path / "tiny.md").write_text(TEMPLATE)
    monkeypatch.setattr(page, "template_path", lambda name: tmp_path / "tiny.md")
    monkeypatch.setattr(starts, "alone", lambda _, *args: here(*args))
    monkeypatch.setattr(CpuUse, "others", lambda self, later: 0.02)
    return tmp_path / "entry"


def test_starts_are_joined_and_a_change_inside_its_interval_is_no_difference(tiny):
    summary = run_study(STUDY, Size(), out_dir=str(tiny), starts=5)
    assert summary["answer"] == "Change of the time: b no difference, c +100%."
    result = validate_entry(tiny)
    mean = row_of(result, "timing", policy="b")
    assert mean["ms"] == pytest.approx(np.mean(NOISE["b"])) and mean["ms_n"] == 5
    low, high = mean["ms_low"], mean["ms_high"]
    assert low < mean["ms"] < high < low + 1
    assert mean["same_low"] == mean["same_high"] == mean["same"]
    low, high = result["starts"]["intervals"]["change"]
    assert low < 0 < high
    assert result["starts"]["intervals"]["slow"] == pytest.approx([1, 1])
    text = (tiny / "README.md").read_text()
    assert "Of 3 policies." in text
    assert "| b | no difference |" in text and "| c | +100% |" in text
    assert "Over a: b no difference, c 2.00; less 1\nno difference." in text
    assert text.count("| b | no difference |") == 2 and "| c | 2.00 |" in text
    assert "Starts: 5 fresh processes" in text and "at most 2% of the CPU" in text
    each = result["starts"]["each"]
    assert [one["number"] for one in each] == list(range(5))
    assert {"started_utc", "commit", "load_before", "others"} <= each[0].keys()
    assert result["checks"] == {"it ran": False}  # start 3


def test_appended_starts_go_on_where_the_entry_ends(tiny, monkeypatch):
    command = "python launch/study.py tiny --starts 3 --append"
    monkeypatch.setattr("sys.orig_argv", ["python", *command.split()[1:]])
    run_study(STUDY, Size(), out_dir=str(tiny), starts=2)
    run_study(STUDY, Size(), out_dir=str(tiny), starts=3, append=True)
    result = validate_entry(tiny)
    assert [one["number"] for one in result["starts"]["each"]] == [0, 1, 2, 3, 4]
    assert row_of(result, "timing", policy="a")["ms"] == np.mean(NOISE["a"])
    assert result["command"] == "python launch/study.py tiny --starts 5 --overwrite"
    assert "Starts: 5." in (tiny / "README.md").read_text()
    with pytest.raises(ConfigError, match="was measured with rounds 3, 4 is asked for"):
        run_study(STUDY, Size(rounds=4), out_dir=str(tiny), starts=1, append=True)


def test_each_start_to_come_is_checked_before_any_is_made(tiny, monkeypatch):
    def check(settings):
        checked.append((start_number(), settings.seed, settings.rounds))
        if settings.seed > 10:
            raise ConfigError("no more")

    checked, study = [], dataclasses.replace(STUDY, check=check)
    run_study(study, Size(), out_dir=str(tiny), starts=2)
    assert checked == [(0, 7, 1), (1, 8, 1)]
    checked.clear()
    with pytest.raises(ConfigError, match="no more"):
        run_study(study, Size(), out_dir=str(tiny), starts=3, append=True)
    assert checked == [(2, 9, 1), (3, 10, 1), (4, 11, 1)]
    assert numbers_of(tiny) == [0, 1]


def test_a_study_may_keep_its_seed_in_all_starts():
    study = dataclasses.replace(STUDY, start={"rounds": 1, "seed": None})
    settings = of_start(study, Size(), 2)
    assert (settings.rounds, settings.seed) == (1, 7)


def test_a_start_beside_others_is_marked_and_repeated(tiny, monkeypatch, capsys):
    shares = iter([0.5, 0.05, 0.2, 0.3, 0.4])
    monkeypatch.setattr(CpuUse, "others", lambda self, later: next(shares))
    run_study(STUDY, Size(), out_dir=str(tiny), starts=2)
    each = validate_entry(tiny)["starts"]["each"]
    found = [(one["number"], one["busy"], one["used"]) for one in each]
    first = [(0, True, False), (0, False, True)]
    assert found == [*first, (1, True, False), (1, True, False), (1, True, True)]
    assert "Starts 1 shared it with others" in (tiny / "README.md").read_text()
    assert "others' CPU 50%" in capsys.readouterr().out


def test_a_start_has_one_round_another_seed_and_an_order_of_its_own():
    settings = of_start(STUDY, Size(), 2)
    assert (settings.rounds, settings.seed) == (1, 9)
    orders = set()
    for number in range(20):
        with started(number):
            orders.add(tuple(round_order("abc", 0)))
            assert round_order("abc", 0) == round_order("abc", 0)
    assert len(orders) == 6  # all there are
    assert start_number() is None and round_order("abc", 0) == ["a", "b", "c"]


def start_of(number, values, within=0.0, key="a"):
    rows = Rows(STUDY.frames)
    ms = median(values) if values else interval(1.0, (1 - within, 1 + within), 9)
    rows("timing", key, ms=ms, same=1.0)
    return {"number": number} | kept(rows)


def one_measure(found):
    study = dataclasses.replace(STUDY, derive=lambda tables: {})
    stored = join(study, found).rows.stored()["timing"]
    assert stored["bounds"]["ms"] == "95 % interval"
    return stored["rows"][0][1]


def test_observations_of_a_start_are_drawn_too():
    """Two starts of one mean: only what is inside of them spreads."""
    alike = one_measure([start_of(0, [2.0]), start_of(1, [2.0])])
    apart = one_measure([start_of(0, [1.0, 3.0]), start_of(1, [1.0, 3.0])])
    assert alike == [2.0, 2, 2.0, 2.0]
    assert apart[0] == 2.0 and 1.0 <= apart[2] < 1.5 and 2.5 < apart[3] <= 3.0


def test_an_interval_of_tokens_is_kept_where_starts_agree():
    found = [start_of(number, [], within=0.25) for number in (0, 1)]
    assert one_measure(found) == [1.0, 2, 0.75, 1.25]


def test_starts_of_other_rows_are_refused():
    with pytest.raises(ConfigError, match="starts gave other rows of frame timing"):
        join(STUDY, [start_of(0, [1.0]), start_of(4, [1.0], key="z")])
    fewer = start_of(4, [1.0])
    del fewer["frames"]["timing"][0]["values"]["same"]
    with pytest.raises(ConfigError, match="start 4 gave other rows than start 0"):
        join(STUDY, [start_of(0, [1.0]), fewer])


def test_rows_that_some_start_lacks_are_left_out_of_partial_frames():
    study = dataclasses.replace(STUDY, derive=lambda tables: {}, partial=("timing",))
    found = [start_of(number, [1.0 + number]) for number in (0, 1, 2)]
    for number, start in enumerate(found):
        more = {"keys": [f"only {number}"], "values": {"ms": [9.0]}, "within": {}}
        start["frames"]["timing"].insert(0, more)
    rows = join(study, found).rows.stored()["timing"]["rows"]
    assert [(row[0], row[1][0]) for row in rows] == [("a", 2.0)]
    assert len(found[0]["frames"]["timing"]) == 2  # what was measured stays
    found[2]["frames"]["timing"].pop()
    with pytest.raises(ConfigError, match="no row of frame timing is in all starts"):
        join(study, found)


def test_rows_of_another_order_are_joined_by_their_keys():
    study = dataclasses.replace(STUDY, derive=lambda tables: {})
    first, second = (start_of(number, [1.0]) for number in (0, 1))
    for start in (first, second):
        rows = start["frames"]["timing"]
        rows.append({"keys": ["z"], "values": {"ms": [9.0], "same": [1.0]}})
        rows[1]["within"] = {}
    second["frames"]["timing"].reverse()
    stored = join(study, [first, second]).rows.stored()["timing"]["rows"]
    assert [(row[0], row[1][0]) for row in stored] == [("a", 1.0), ("z", 9.0)]


@pytest.mark.parametrize("count", [1, 2])
def test_a_study_may_read_the_bounds_of_what_it_measured(count):
    """Also where a start has one observation, and in every draw."""
    study = dataclasses.replace(
        STUDY,
        derive=lambda tables: {"low": float(tables["timing"].ms_low.min())},
    )
    found = [start_of(number, [1.0 + number]) for number in range(count)]
    joined = join(study, found)
    assert joined.rows.stored()["timing"]["rows"][0][1][1] == count
    assert ("low" in joined.intervals) == (count > 1)


def test_a_run_of_starts_that_was_cut_off_goes_on(tiny, monkeypatch, capsys):
    made = []

    def until_two(_, *args):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(args)
        return here(*args)

    monkeypatch.setattr(starts, "alone", until_two)
    with pytest.raises(KeyboardInterrupt):
        run_study(STUDY, Size(), out_dir=str(tiny), starts=5)
    kept_file = tiny.with_name("entry.starts.partial")
    assert kept_file.is_file() and not (tiny / "result.json").exists()
    with pytest.raises(ConfigError, match="rounds 3, 4 is asked for; keep the setti"):
        run_study(STUDY, Size(rounds=4), out_dir=str(tiny), starts=5)
    monkeypatch.setattr(starts, "alone", lambda _, *args: here(*args))
    run_study(STUDY, Size(), out_dir=str(tiny), starts=5)
    each = validate_entry(tiny)["starts"]["each"]
    assert [one["number"] for one in each] == [0, 1, 2, 3, 4]
    assert "goes on after 2 of 5 starts" in capsys.readouterr().out
    assert not kept_file.exists()


def cut_off(tiny, monkeypatch, after, **given):
    """A run of starts that ends while it makes another."""
    left = iter(range(after))

    def ends(_, *args):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return here(*args)

    monkeypatch.setattr(starts, "alone", ends)
    with pytest.raises(KeyboardInterrupt):
        run_study(STUDY, Size(), out_dir=str(tiny), **given)
    monkeypatch.setattr(starts, "alone", lambda _, *args: here(*args))


def numbers_of(tiny):
    return [one["number"] for one in validate_entry(tiny)["starts"]["each"]]


@pytest.mark.parametrize("asked", [3, 6])
def test_a_run_that_goes_on_makes_as_many_as_are_asked_for_now(
    tiny, monkeypatch, asked
):
    cut_off(tiny, monkeypatch, 2, starts=5)
    run_study(STUDY, Size(), out_dir=str(tiny), starts=asked)
    assert numbers_of(tiny) == list(range(asked))


def test_starts_added_to_an_entry_go_on_as_such_alone(tiny, monkeypatch):
    """Neither are those of an entry lost, nor what was measured beside it."""
    where = {"out_dir": str(tiny)}
    run_study(STUDY, Size(), **where, starts=1)
    first = (tiny / "starts.json").read_text()
    cut_off(tiny, monkeypatch, 1, starts=2, append=True)
    with pytest.raises(ConfigError, match="of a run with --append that was cut off"):
        run_study(STUDY, Size(), **where, starts=2, overwrite=True)
    (tiny / "starts.json").write_text(first.replace('"load_before": ', '"load": '))
    with pytest.raises(ConfigError, match="adds to starts that entry no longer has"):
        run_study(STUDY, Size(), **where, starts=2, append=True)
    (tiny / "starts.json").write_text(first)
    run_study(STUDY, Size(), **where, starts=2, append=True)
    assert numbers_of(tiny) == [0, 1, 2]
    cut_off(tiny, monkeypatch, 1, starts=2, overwrite=True)
    with pytest.raises(ConfigError, match="of a run without --append that was cut"):
        run_study(STUDY, Size(), **where, starts=2, append=True)
    assert numbers_of(tiny) == [0, 1, 2]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"starts": ', '"begins": '),
        ('"settings": ', '"set": '),
        ('"number": 0', '"number": "0"'),
        ('"ms": [', '"miles": ['),  # as a version with another measure wrote it
        ('"timing": ', '"times": '),
        ('"keys": [', '"keys": ["more", '),
        ('"ms": [', '"ms": [[], '),
        ('"checks": ', '"checked": '),
        ("{", "[{"),
    ],
)
def test_starts_that_are_damaged_or_of_other_rows_are_refused_at_once(
    tiny, monkeypatch, old, new
):
    """Before further ones are measured, which could not be joined with them."""
    cut_off(tiny, monkeypatch, 1, starts=2)
    kept_file = tiny.with_name("entry.starts.partial")
    text = kept_file.read_text()
    assert old in text
    changed = text.replace(old, new, 1)
    kept_file.write_text(changed + "]" * (new == "[{"))
    monkeypatch.setattr(starts, "alone", None)
    with pytest.raises(ConfigError, match="partial holds no starts that tiny can be j"):
        run_study(STUDY, Size(), out_dir=str(tiny), starts=2)
    kept_file.write_text(text[:-9])
    with pytest.raises(ConfigError, match="entry.starts.partial.*JSON"):
        run_study(STUDY, Size(), out_dir=str(tiny), starts=2)


def test_a_start_that_others_disturbed_is_repeated_by_the_run_that_goes_on(
    tiny, monkeypatch
):
    shares = iter([0.0, 0.5, 0.0, 0.0])
    monkeypatch.setattr(CpuUse, "others", lambda self, later: next(shares))
    cut_off(tiny, monkeypatch, 2, starts=3)
    run_study(STUDY, Size(), out_dir=str(tiny), starts=3)
    assert numbers_of(tiny) == [0, 1, 1, 2]


def test_texts_that_starts_found_stand_side_by_side():
    frames = {"best": frame("batch fastest", ms="ms")}
    study = dataclasses.replace(STUDY, frames=frames, derive=lambda tables: {})
    starts_of = []
    for number, names in enumerate(("ab", "cb", "ab")):
        rows = Rows(frames)
        for batch, name in enumerate(names):
            rows("best", batch, name, ms=float(number))
        starts_of.append({"number": number} | kept(rows))
    stored = join(study, starts_of).rows.stored()["best"]["rows"]
    assert [row[:2] for row in stored] == [[0, "a / c"], [1, "b"]]


@pytest.mark.parametrize(
    ("study", "given", "message"),
    [
        (STUDY, {"append": True}, "append adds starts to an entry; say how many"),
        (STUDY, {"starts": 0}, "starts"),
        (STUDY, {"starts": 1, "append": True}, "starts.json is not there: only an"),
        (
            dataclasses.replace(STUDY, start={"repeats": 1}),
            {"starts": 2},
            "study tiny has no repeats to cut in a start",
        ),
        (
            dataclasses.replace(STUDY, frames={}, question="q?"),
            {"starts": 2},
            "study tiny keeps no rows, so --starts cannot join them",
        ),
    ],
)
def test_starts_that_cannot_be_are_refused(study, given, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        run_study(study, Size(), out_dir=str(tmp_path / "o"), **given)


def test_studies_of_the_table_of_starts_can_be_measured_in_starts():
    """Those of which docs/use.md tells how many starts they have."""
    root = Path(__file__).parents[2]
    text = (root / "docs" / "use.md").read_text()
    names = re.findall(r"^\| (\w+) \| \d+ \| 2026-", text, re.MULTILINE)
    assert len(names) > 5
    for name in names:
        study = find(read_result(root / "results" / name)["study"])
        of_start(study, study.settings(), 0)


ONE_PROCESS = (
    *("smoe_fig3", "smoe_fig10", "smoe_fig12", "moe_prism_fig10", "od_moe_fig9"),
    *("prism_fig5_live", "prism_three_servers", "coserve_fig1", "coserve_fig5"),
    *("coserve_fig17_live", "coserve_fig19"),
)


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_a_start_of_a_timed_study_is_cut_to_a_part_of_it(name):
    study = find(name)
    whole = study.settings()
    start = of_start(study, whole, 1)
    for setting, value in study.start.items():
        assert getattr(start, setting) == value <= getattr(whole, setting)


def test_a_start_measures_no_more_than_was_asked_for():
    study = find("coserve_fig1")
    few = of_start(study, study.settings(small_repeats=2, large_repeats=4), 0)
    assert (few.small_repeats, few.large_repeats) == (2, 3)


def test_share_of_others_by_hand():
    before, later = CpuUse(1.0, 10.0, 100.0), CpuUse(4.0, 14.0, 120.0)
    assert before.others(later) == pytest.approx((4 - 3) / 20)
    now = CpuUse.now()
    assert now is None or 0 <= now.own_s <= now.busy_s <= now.all_s


@pytest.mark.slow
def test_a_start_is_a_process_of_its_own(capsys):
    """A registered study, since a fresh process finds it by name."""
    study = dataclasses.replace(find("coserve_fig11"), start={"seeds": 1})
    settings = study.settings(decays=(32.0,))
    found = take_starts(study, settings, Plan([], 2))
    assert [one["number"] for one in used(found)] == [0, 1]
    assert json.dumps(found) and found[0]["frames"]["needed"]
    assert all(one["checks"] for one in found)

"""Tests of the comparison of an entry with one that was measured again."""

import copy
import json
import shutil

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.metrics.again import Found, compare, main, report
from moe_edge.metrics.conditions import other_conditions
from moe_edge.metrics.machine import REPOSITORY
from moe_edge.metrics.repeated import MANY, Value, most_outside
from moe_edge.metrics.schema import read_result

TIMED, COMPUTED = "smoe_fig11", "coserve_fig11"


@pytest.fixture(scope="module")
def read():
    """A results entry by name, to be changed."""
    results = {}

    def entry(name):
        if name not in results:
            results[name] = read_result(REPOSITORY / "results" / name)
        return copy.deepcopy(results[name])

    return entry


def moved(result, frame, measure, by):
    """Moves a measure of all rows of a frame, with its bounds, by a share."""
    stored = result["frames"][frame]
    place = len(stored["keys"]) + list(stored["units"]).index(measure)
    for row in stored["rows"]:
        if isinstance(row[place], list):
            value, n, low, high = row[place]
            row[place] = [value * (1 + by), n, low * (1 + by), high * (1 + by)]
        elif row[place] is not None:
            row[place] *= 1 + by
    return result


@pytest.mark.parametrize("name", [TIMED, COMPUTED, "benchmark_decode"])
def test_an_entry_repeats_itself(read, name):
    found = compare(read(name), read(name))
    assert found.equal and not found.faults()
    assert (found.within, found.outside, found.loose) == ({}, {}, {})


def test_times_repeat_within_their_bounds_and_not_beyond(read):
    near = compare(read(TIMED), moved(read(TIMED), "systems", "tpot_ms", 0.002))
    assert len(near.within) > 50 and not near.faults()
    far = compare(read(TIMED), moved(read(TIMED), "systems", "tpot_ms", 0.5))
    assert len(far.outside) > 50
    assert far.faults()[0].endswith("values lie outside")
    assert "systems: mmlu, SMoE, 0.33, 1: tpot_ms" in far.outside
    assert report(far)[-1].startswith("does not repeat: ")


def test_two_intervals_allow_what_their_difference_allows(read):
    found = compare(read(TIMED), read(TIMED))
    found.add("apart", Value(1, 0.7, 1.3), Value(1.43, 1.03, 1.83))
    found.add("too far", Value(1, 0.7, 1.3), Value(1.51, 1.11, 1.91))
    assert (list(found.within), list(found.outside)) == (["apart"], ["too far"])


def test_bounds_without_a_width_allow_no_difference(read):
    """Such as a count that was the same in all starts."""
    found = compare(read(TIMED), read(TIMED))
    found.add("counts", Value(5, 5, 5), Value(6, 6, 6))
    assert list(found.outside) == ["counts"] and not found.loose


def bootstrapped(count, rng):
    """Means of so many normal starts, and their bounds by a bootstrap; 4,000 values.

    Of two or three starts these are the least and the largest: it draws one of them
    each time in 1 of 4 or of 27 times.
    """
    drawn = rng.normal(size=(4000, count))
    ends = drawn.min(axis=-1), drawn.max(axis=-1)
    if count > 3:
        again = rng.integers(count, size=(300, count))
        ends = np.percentile(drawn[:, again].mean(axis=-1), (2.5, 97.5), axis=-1)
    return np.stack([drawn.mean(axis=-1), *ends], axis=-1).tolist()


@pytest.mark.parametrize(
    ("counts", "as_they_are"), [((3, 3), 0.83), ((2, 2), 0.58), ((7, 2), 0.70)]
)
def test_bounds_of_few_starts_are_too_narrow_and_widened(counts, as_they_are):
    """Of entries that repeat, 95 of 100 values lie within, however many starts either
    has, and fewer by bounds as they are."""
    rng = np.random.default_rng(0)
    pairs = list(zip(*(bootstrapped(count, rng) for count in counts), strict=True))
    shares = []
    for n, m in (counts, (MANY, MANY)):
        found = Found(is_computed=False)
        for number, (mine, its) in enumerate(pairs):
            found.add(str(number), Value(*mine, n), Value(*its, m))
        shares.append(len(found.within) / len(pairs))
    assert shares == [pytest.approx(s, abs=0.02) for s in (0.95, as_they_are)]


def test_many_observations_say_nothing_of_how_few_starts_vary():
    """Such as tokens beside starts: each side's bounds count as they are."""
    found = Found(is_computed=False)
    tokens = Value(1, 0.99, 1.01, 1000)
    found.add("near", tokens, Value(1.11, 1.0, 1.22, 5))
    found.add("far", tokens, Value(1.13, 1.02, 1.24, 5))
    assert (list(found.within), list(found.outside)) == (["near"], ["far"])


def test_one_observation_has_no_bounds():
    found = Found(is_computed=False)
    found.add("once", Value(5, 5, 5, 1), Value(6, 6, 6, 1))
    assert list(found.loose) == ["once"]


def test_chance_leaves_few_values_outside():
    assert [most_outside(count) for count in (0, 1, 21, 100)] == [0, 0, 3, 9]


def test_values_without_bounds_are_told_in_the_judgement(read):
    found = compare(read(TIMED), read(TIMED))
    found.add("apart", Value(1, 0.7, 1.3), Value(1.2, 0.9, 1.5))
    found.add("free", Value(1), Value(2))
    assert report(found)[-1] == "repeats, 1 values without bounds aside"


@pytest.mark.parametrize("key", ["study", "kind"])
def test_entries_of_other_studies_or_kinds_are_refused(read, key):
    with pytest.raises(ConfigError, match=f"{key} is 'another' in one entry"):
        compare(read(TIMED) | {key: "another"}, read(TIMED))


def test_another_machine_model_or_seed_is_told(read):
    its = read(TIMED)
    its["machine"]["cpu"], its["seeds"] = "another", [7]
    one, other = other_conditions(read(TIMED), its)
    assert one.startswith("machine's cpu ") and one.endswith(", again another")
    assert other.endswith(", again [7]")
    assert not other_conditions(read(TIMED), read(TIMED))


def test_computed_values_have_to_be_equal(read):
    mine, its = read(COMPUTED), read(COMPUTED)
    frame = next(iter(its["frames"]))
    measure = next(iter(its["frames"][frame]["units"]))
    found = compare(mine, moved(its, frame, measure, 1e-4))
    assert found.loose
    assert any("computed values differ" in fault for fault in found.faults())


def test_bounds_of_a_table_that_was_joined_are_no_values(read):
    mine, its = read(TIMED), read(TIMED)
    of = {"ms_replay": 1.0, "ms_n_replay": 3, "ms_low_replay": 0.9, "ms_high_replay": 2}
    mine["numbers"]["replayed"] = [of, {"ms_low_replay": 1.0}]
    again = of | {"ms_n_replay": 2, "ms_low_replay": 0.8}
    its["numbers"]["replayed"] = [again, {"ms_low_replay": 2.0}]
    found = compare(mine, its)
    assert list(found.loose) == ["numbers/replayed/1/ms_low_replay"]


def test_what_starts_compute_need_not_be_equal(read):
    """They have seeds of their own."""
    mine, its = read(TIMED), read(TIMED)
    for number, one in enumerate((mine, its)):
        one["kind"], one["numbers"]["more"] = "simulated", float(number)
    assert list(compare(mine, its).loose) == ["numbers/more"]
    assert compare(mine, its).faults() == ["none of 1 that differ has bounds"]
    for one in (mine, its):
        del one["starts"]
    assert compare(mine, its).faults() == ["1 computed values differ"]


def test_times_without_bounds_prove_nothing(read):
    its = read("benchmark_decode")
    for row in its["metrics"]:
        row["value"] *= 2
        row["spread"] = {"kind": "none", "value": 0.0}
    (fault,) = compare(read("benchmark_decode"), its).faults()
    assert fault.startswith("none of ") and fault.endswith(" that differ has bounds")


def test_rows_match_by_keys_and_not_by_order_or_by_who_was_fastest(read):
    its = read(TIMED)
    its["frames"]["systems"]["rows"].reverse()
    rows = its["frames"]["against"]["rows"]
    place = its["frames"]["against"]["keys"].index("rivals")
    rows[0][place] = "another"
    found = compare(read(TIMED), its)
    assert not found.faults()
    assert found.told == ["against: rivals"]


def test_a_row_that_is_missing_is_told(read):
    its = read(TIMED)
    row = its["frames"]["systems"]["rows"].pop()
    found = compare(read(TIMED), its)
    assert any(str(row[1]) in name for name in found.lacking)
    count = len(found.lacking)
    assert found.faults() == [f"{count} rows or numbers are lacking"]
    other_way = compare(its, read(TIMED))  # what a later version adds is no fault
    assert len(other_way.added) == count and not other_way.faults()
    assert report(other_way)[-2] == f"  {count} rows or numbers are new"


def test_entries_of_two_studies_are_refused(read):
    with pytest.raises(ConfigError, match="study is 'smoe_fig11' in one entry"):
        compare(read(TIMED), read("smoe_fig14"))


def test_the_command_compares_two_folders(read, tmp_path, capsys):
    entry = REPOSITORY / "results" / TIMED
    again = tmp_path / "again"
    shutil.copytree(entry, again)
    config = again / "config.gin"
    text = config.read_text()
    assert "smoe_fig11.starts = 1" in text
    config.write_text(text.replace("smoe_fig11.starts = 1", "smoe_fig11.starts = 2"))
    assert main([str(entry), str(again)]) == 0
    said = capsys.readouterr().out
    assert said.endswith("repeats\n") and "note:" not in said
    assert "smoe_fig11.a = 0.2" in text
    config.write_text(text.replace("smoe_fig11.a = 0.2", "smoe_fig11.a = 0.3"))
    other = moved(read(TIMED), "systems", "tpot_ms", 0.5)
    (again / "result.json").write_text(json.dumps(other))
    assert main([str(entry), str(again)]) == 1
    said = capsys.readouterr().out
    assert "one entry names: smoe_fig11.a = 0.2, smoe_fig11.a = 0.3\n" in said
    assert "does not repeat" in said
    with pytest.raises(SystemExit, match="error: .*no_such"):
        main([str(entry), str(tmp_path / "no_such")])

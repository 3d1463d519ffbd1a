"""Fronts and bars of made-up points, and times from one replay for all links."""

import dataclasses

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.metrics.frames import Rows, interval, tables
from moe_edge.metrics.page import render
from moe_edge.offload.evict_base import get_eviction
from moe_edge.offload.link import EmulatedLink
from moe_edge.simulate.replay.lookups import equal_slots
from moe_edge.simulate.replay.timed import CostModel, replay_time
from moe_edge.studies.composition import fronts
from moe_edge.studies.composition.methods import (
    COMPOSED,
    LOSSLESS,
    PAPER,
    methods,
)
from moe_edge.studies.composition.settings import ComposeSettings
from moe_edge.studies.composition.times import (
    Steps,
    foreseen,
    moves,
    save_cut,
    time_of,
)
from moe_edge.workload.trace_reader import read_trace
from tests.support.traces import make_trace


def case(rows, name, family, ratio, ms, moved=1.0, format="bfloat16"):
    rows("times", name, "25%", 2.0, tpot_ms=ms)
    rows(
        *("points", name, family, format, "25%"),
        **{"slots": 16, "moved": moved, "moved_kb": moved, "agreement": 0.9},
        ratio=interval(ratio, (ratio - 0.001, ratio + 0.001), 100),
    )


def measured(both_ms=5.0) -> Rows:
    rows = Rows(fronts.FRAMES)
    case(rows, "lru", LOSSLESS, 1.0, 10, moved=20)
    case(rows, "smoe", PAPER, 1.005, 6, moved=9)
    case(rows, "wild", PAPER, 1.02, 1)
    case(rows, "both", COMPOSED, 1.006, both_ms, moved=8)
    case(rows, "q4, both", COMPOSED, 1.002, 3, moved=1, format="q4_0")
    quality = {"exact_match": 0.5, "questions": 4}
    rows("quality", "bfloat16", ratio=interval(1.0, (1, 1), 9), **quality)
    return rows


def of(rows):
    return tables(rows.stored())


def test_front_holds_what_no_other_beats_in_both():
    points = fronts.joined(of(measured()))
    assert fronts.front(points).method.tolist() == ["lru", "q4, both", "wild"]
    assert fronts.least(points, "tpot_ms")["method"] == "q4, both"
    assert fronts.least(points[points.method == "wild"], "tpot_ms") is None


def test_both_bars_are_judged_and_the_page_follows_the_rows():
    rows = measured()
    rows("live", "lru", "25%", 2.0, tpot_ms=11.0, misses=21.0)
    found = fronts.derive(of(rows))
    assert all(found["checks"].values()) and len(found["checks"]) == 2
    (lead,) = found["leads"]
    assert lead == {"budget": "25%", "link": 2.0, "lead": pytest.approx(0.2)}
    assert found["fewest"]["share"] == pytest.approx(1 / 8)
    assert found["fewest"]["base"] == "both"
    (replayed,) = found["replayed"]
    assert replayed["error"] == pytest.approx(0.1)
    worse = fronts.derive(of(measured(both_ms=7.0)))
    assert [*worse["checks"].values()] == [False, True]
    pages = [page_of(one, numbers) for one, numbers in ((rows, found), (rows, worse))]
    assert (
        "of its best composition: +20.0%;" in pages[0]
        and "lru, link 2: 11.00 ms" in pages[0]
    )
    assert "of its best composition: -14.3%;" in pages[1] and "Emulated" not in pages[1]


def test_a_page_of_nothing_within_the_bound_says_so():
    rows = Rows(fronts.FRAMES)
    case(rows, "wild", PAPER, 1.02, 1)
    rows("quality", "bfloat16", ratio=1.0, exact_match=0.5, questions=4)
    numbers = fronts.derive(of(rows))
    assert [*numbers["checks"].values()] == [False, False] and not numbers["leads"]
    assert "Nothing composed is within the bound" in page_of(rows, numbers)


def page_of(rows, numbers) -> str:
    kept = {name: found for name, found in numbers.items() if name != "checks"}
    facts = {"workload": {}, "machine": {}, "model": {}}
    result = facts | {"frames": rows.stored(), "numbers": kept}
    return render("better_together", result)[0]


def test_live_cases_are_the_best_of_each_group_at_the_middle():
    points = fronts.joined(of(measured()))
    names = points.method.tolist()
    chosen = fronts.live_cases(points, names, 5)
    assert [row["method"] for row in chosen] == ["lru", "smoe", "both", "q4, both"]
    assert {row["link"] for row in chosen} == {2.0}
    assert fronts.live_cases(points, names, 0) == []
    few = fronts.live_cases(points, {"lru", "both"}, 5)
    assert [row["method"] for row in few] == ["lru", "both"]
    slow = fronts.joined(of(measured(both_ms=7.0)))  # times of another start
    again = fronts.live_cases(slow, names, 5)
    assert [row["method"] for row in again] == [row["method"] for row in chosen]


def test_one_replay_tells_all_links(tmp_path):
    """As the replay of each link by itself, neighbours sharing a latency."""
    rng, rows = np.random.default_rng(0), []
    for step in range(24):
        for layer in range(2):
            ids = rng.choice(9, 3, replace=False).tolist()
            rows.append((1, step, layer, ids))
    scores_TE = np.zeros((48, 9), np.float16)
    trace = make_trace(rows, num_experts=9, scores_TE=scores_TE)
    save_cut(tmp_path / "trace.csv.gz", trace, 8)
    kept = read_trace(tmp_path / "trace.csv.gz")
    assert kept.phase.tolist() == [0] * 16 + [1] * 16 and kept.scores_TE is not None
    links = [EmulatedLink(1e6, 1e-4), EmulatedLink(3e7, 5e-5)]
    steps, lru = Steps(2e-3, 1e-6, 1e-3), methods()[0]
    runs, moved = moves(kept, lru, 4, 7000)
    assert runs < moved
    for link in links:
        costs = CostModel(5e-4, 5e-4, 7000, link)
        layer_S = equal_slots(kept, 4)
        wanted = replay_time(kept, get_eviction("lru"), layer_S, costs).tpot_s
        found = time_of(runs, moved, 7000, link, steps)
        assert found == pytest.approx(wanted + 1e-6 * moved, rel=1e-9)
    oracle = dataclasses.replace(lru, foresight=1)
    ahead, sent = foreseen(kept, oracle, 4, 7000, links[1], steps)
    assert ahead < time_of(runs, moved, 7000, links[1], steps) and sent >= moved / 2
    shadowed = dataclasses.replace(oracle, shadow=0.1)
    assert foreseen(kept, shadowed, 4, 7000, links[1], steps)[0] == pytest.approx(
        ahead + 2e-3
    )


def test_methods_have_names_of_their_own_and_bars_need_both_families():
    names = [method.name for method in methods()]
    assert len({*names}) == len(names)
    families = {method.family for method in methods()}
    assert families == {"lossless", "paper", "newer", "format", "composed"}


@pytest.mark.parametrize(
    "given, words",
    [
        ({"shares": (0.0,)}, "shares holds 0.0, expected shares above 0"),
        ({"live_cases": 13}, "live_cases is 13, expected 0 to 12"),
        ({"tokens": 1000}, "expected rows of 2 or more and twice the 768 timed_steps"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        ComposeSettings(**given)

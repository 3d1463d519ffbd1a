"""Fronts and bars of made-up points, and times from one replay for all links."""

import dataclasses

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.metrics.schema import check_answer
from moe_edge.offload.evict_base import get_eviction
from moe_edge.offload.link import EmulatedLink
from moe_edge.simulate.replay.lookups import equal_slots
from moe_edge.simulate.replay.timed import CostModel, replay_time
from moe_edge.studies.composition import fronts
from moe_edge.studies.composition.methods import (
    COMPOSED,
    LOSSLESS,
    PAPER,
    Method,
    Variant,
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

SETTINGS = ComposeSettings(shares=(0.25,), link_factors=(2.0,))


def point(name, family, ratio, ms, moved=1.0, format="bfloat16") -> fronts.Point:
    return fronts.Point(
        method=Method(name, family, Variant(format)),
        share=0.25,
        slots=16,
        ratio=ratio,
        interval=(ratio - 0.001, ratio + 0.001),
        agreement=0.9,
        tokens=100,
        moved=moved,
        moved_bytes=1000 * moved,
        tpot_s={"2": 1e-3 * ms},
    )


POINTS = [
    point("lru", LOSSLESS, 1.0, 10, moved=20),
    point("smoe", PAPER, 1.005, 6, moved=9),
    point("wild", PAPER, 1.02, 1),
    point("both", COMPOSED, 1.006, 5, moved=8),
    point("q4, both", COMPOSED, 1.002, 3, moved=1, format="q4_0"),
]


def test_front_holds_what_no_other_beats_in_both():
    names = [p.method.name for p in fronts.front(POINTS, "2")]
    assert names == ["lru", "q4, both", "wild"]
    assert fronts.best(POINTS, "2").method.name == "q4, both"


def test_findings_judge_both_bars():
    steps = {"lru": Steps(1e-3, 1e-5, 2e-4)}
    entry = {"model": {"name": "m", "params": 1, "weights": "given"}, "workload": {}}
    quality = {"bfloat16": {"ratio": 1.0, "interval": [1, 1], "tokens": 9}}
    quality["bfloat16"] |= {"exact_match": 0.5, "questions": 4}
    live = [(POINTS[0], 2.0, 0.011, 21.0)]
    given = quality, live, entry, steps
    found = fronts.findings(SETTINGS, POINTS, *given)
    assert all(found.checks.values()) and len(found.checks) == 2
    assert found.summary["leads"] == {"0.25 2": pytest.approx(0.2)}
    assert found.summary["bytes_share"] == pytest.approx(1 / 8)
    assert found.summary["replay_error"] == [pytest.approx(0.1)]
    check_answer(found.answer)
    slow = dataclasses.replace(POINTS[3], tpot_s={"2": 7e-3})
    worse = fronts.findings(SETTINGS, [*POINTS[:3], slow, POINTS[4]], *given)
    assert [*worse.checks.values()] == [False, True]


def test_live_cases_are_the_best_of_each_group_at_the_middle():
    chosen = fronts.live_points(POINTS, SETTINGS)
    assert [p.method.name for p, _ in chosen] == ["lru", "smoe", "both", "q4, both"]
    assert {factor for _, factor in chosen} == {2.0}
    none = dataclasses.replace(SETTINGS, live_cases=0)
    assert fronts.live_points(POINTS, none) == []


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

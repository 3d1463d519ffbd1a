"""Suite `placement` on small sizes."""

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.papers.prism.studies import speed_simulate as placement_simulate
from moe_edge.papers.prism.studies.speed import (
    PlacementSettings,
    gap_rows,
    linear_program,
    memory,
    placement_rows,
    zipf,
)
from moe_edge.place.optimal import best_cover

SMALL = PlacementSettings(
    repeats=2,
    gpus=4,
    tokens=1,
    speed=(),
    requests_per_server=1,
    latency_seeds=1,
    layers=3,
    experts=8,
    limit_s={2: 1.0, 4: 2.0},
    lp_servers=2,
    gap_servers=(3,),
    ratios=(1.05, 1.5),
    seeds=2,
)


@pytest.mark.slow
def test_placement_rows_are_times_gaps_and_simulated_rows(monkeypatch):
    kept = {"mixed": placement_simulate.SETTINGS["mixed bigbench"]}
    monkeypatch.setattr(placement_simulate, "SETTINGS", kept)
    monkeypatch.setattr("moe_edge.simulate.cluster.build.POOL_TOKENS", 400)
    rows = {row["case"]: row for row in placement_rows(SMALL, None)}
    assert rows["latency/latency mixed against optimal"]["bar"] == 0.9
    timed = rows["seconds/optimal 2 x 3 x 8"]
    assert timed["limit_fraction"] == timed["ours"] / 1.0
    assert timed["ratio"] == pytest.approx(np.median(timed["round_ratios"]))
    assert rows["seconds/optimal 4 x 3 x 8"]["peer"] is None
    assert rows["seconds/latency 4 x 3 x 8"]["limit_fraction"] > 0
    gaps = [row for case, row in rows.items() if case.startswith("gap/")]
    assert len(gaps) == 7 * 2 * 2
    assert all(gap >= -1e-9 for row in gaps for gap in row["runs"]["ours"])
    assert rows["gap/uniform 3 equal 1.5x"]["ours"] > 0


def test_gaps_where_every_server_holds_all_are_refused():
    with pytest.raises(ConfigError, match="3 servers with 3.0x memory hold everything"):
        gap_rows(3, 3.0, False, SMALL)


def test_memory_is_what_was_asked():
    for unequal in (False, True):
        for ratio in (1.0, 1.05, 2.0):
            slots = memory(7, 100, ratio, unequal, seed=1)
            total = sum(s.sum() for s in slots)
            assert 100 * ratio <= total <= 100 * ratio + 7


def test_linear_program_agrees_with_the_optimum():
    value_NM = zipf(3, SMALL, 0).reshape(3, -1)
    capacity_N = np.array([10, 9, 8])
    best = value_NM[best_cover(value_NM, capacity_N)].sum()
    assert linear_program(value_NM, capacity_N) == pytest.approx(best)

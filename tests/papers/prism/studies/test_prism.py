"""Studies of placement: sums by hand, refusals, and whole tiny studies."""

import json
import math

import numpy as np
import pytest

from moe_edge.bench.registry import find
from moe_edge.bench.study import run_study
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.frames import Rows, plain, tables
from moe_edge.metrics.schema import check_answer, validate_entry
from moe_edge.papers.prism.studies.entry import shape_entry
from moe_edge.papers.prism.studies.fig5 import alone, layer_seconds, split_placement
from moe_edge.papers.prism.studies.fig6 import over_time
from moe_edge.papers.prism.studies.fig7 import means
from moe_edge.papers.prism.studies.fig8 import tell_points
from moe_edge.papers.prism.studies.runs import Migration, on_cluster
from moe_edge.papers.prism.studies.sensitivity import copies
from moe_edge.papers.prism.studies.served import (
    EPLB,
    OPTIMUM,
    OURS,
    PRISM,
    MethodRuns,
    losses,
    slower,
)
from moe_edge.papers.prism.studies.table1 import TABLE_1
from moe_edge.papers.prism.studies.table2 import TABLE_2, targets
from moe_edge.simulate.cluster.build import build_scenario
from tests.support.entries import page_of, result_of


def served(**seconds) -> MethodRuns:
    """Rows of two servers, whose latencies are the mean and its double."""
    return MethodRuns(
        {
            method: [
                {"mean_latency_s": x, "latency_s_N": [x, 2 * x], "local_ratio": 0.5}
                for x in by_seed
            ]
            for method, by_seed in seconds.items()
        }
    )


def test_ratios_are_of_pairs_of_the_same_seed():
    found = served(prism=[1.0, 2.0, 9.0], latency=[0.5, 3.0, 3.0])
    assert found.ratio(OURS, PRISM).tolist() == [0.5, 1.5, 1 / 3]


def told(points, pairs=((OURS, EPLB),)):
    """`over` of some points of table II, with changes."""
    rows = Rows(find("prism_table2").frames)
    for at, runs in points.items():
        runs.tell(rows, *at, pairs=pairs)
    return tables(rows.stored())["over"]


def test_equal_latencies_are_no_loss():
    assert slower(np.array([1.0, 1.0004, 1.0006, 0.9])) == 1
    at = ("a", "b", "")
    fine = {"prism": [1.0], "latency": [1.0004]}
    assert len(losses(told({at: served(**fine)}), "workload")) == 0
    worse = {"prism": [1.0, 2.0, 9.0], "latency": [0.5, 3.0, 3.0]}
    (row,) = plain(losses(told({at: served(**worse)}), "workload", "variant"))
    assert (row["method"], row["over"]) == (OURS, PRISM)
    assert (row["worse"], row["seeds"], row["ratio"]) == (1, 3, 0.5)
    assert row["where"] == "a"


def test_cells_are_medians_of_each_server_and_of_the_mean():
    found = served(prism=[1.0, 2.0, 9.0])
    assert found.cells() == {"prism": [2.0, 4.0, 2.0]} and found.is_complete()
    assert not served(prism=[1.0, -1.0]).is_complete()


@pytest.mark.parametrize(
    ("ours", "optimum", "expected"),
    [
        (0.69, 1.0, [True, True]),
        (0.70, 0.7, [False, False]),
        (0.6, 0.66, [True, False]),
    ],
)
def test_targets_are_told_whether_reached_or_not(ours, optimum, expected):
    found = served(**{EPLB: [1.0], OURS: [ours], OPTIMUM: [optimum]})
    at = ("bigbench", "deepseek_v2_lite")
    pairs = ((OURS, EPLB), (OURS, OPTIMUM))
    points = {(*at, variant): found for variant in ("", "unequal")}
    got = targets(told(points, pairs))
    assert list(got.values()) == expected
    assert f"on {', '.join(at)}, unequal" in list(got)[1]


def test_the_paper_s_tables_have_every_cell_and_its_headline():
    assert len(TABLE_1) == 3 and all(len(row) == 4 for row in TABLE_1.values())
    assert sum(len(table) for table in TABLE_2.values()) == 20
    table = TABLE_2["bigbench", "deepseek_v2_lite"]
    assert 1 - table[PRISM][3] / table[EPLB][3] == pytest.approx(0.306, abs=5e-4)


class Result:
    """What the sums read of a finished run."""

    def __init__(self, ratio_W=(), latency_R=(), domain_R=()):
        self.ratio_W = np.array(ratio_W)
        self.latency_R, self.domain_R = np.array(latency_R), tuple(domain_R)


def test_over_time_is_the_median_and_ends_where_a_seed_has_nothing_more():
    nan = math.nan
    results = [Result([0.1, 0.5, 0.3, nan]), Result([0.3, nan, 0.5, 0.9, 0.9])]
    assert over_time(results) == pytest.approx([0.2, 0.5, 0.4])


def test_late_means_are_of_the_new_data_alone():
    result = Result((), [1.0, 2.0, 4.0], ("taco", "ascii", "narrative"))
    assert means([result], late=True).tolist() == [3.0]


def test_fig8_changes_are_of_the_placement_of_prism():
    points = {
        (4, 8.0, 500.0): served(prism=[2.0, 4.0]),
        (8, 8.0, 500.0): served(prism=[1.0, 1.0]),
        (4, 8.0, 100.0): served(prism=[8.0, 8.0]),
        (8, 8.0, 100.0): served(prism=[8.0, 0.5]),
    }
    study = find("prism_fig8")
    settings = study.settings(gpus=(4, 8), intervals_s=(8.0,), mbps=(100.0, 500.0))
    rows = Rows(study.frames)
    rows.about["workload"] = {"workload": "multidata", "requests_per_server": 2}
    tell_points(rows, settings, points)
    result = result_of(study, rows)
    change = {row["at"]: row["change"] for row in result["numbers"]["change"]}
    assert change["arrival 8 s"] == -0.625
    assert change["4 GPUs"] == pytest.approx(-0.625)
    assert list(result["checks"].values()) == [False]
    page, _ = page_of(study, result)
    assert "by -62.5% to -62.5%, and 100 to 500 Mbps by" in page


@pytest.fixture(scope="module")
def case():
    """Two requests a server of 4 prompt tokens, Mixtral's shape."""
    return build_scenario(
        model="mixtral_8x7b", requests_per_server=2, input_tokens=4, output_tokens=1
    )


def test_split_placement_leaves_the_share_to_the_others(case):
    on_NLE = split_placement(case, 0.25, seed=0).on_NLE
    assert (on_NLE[0].sum(axis=-1) == 6).all() and on_NLE[1:].all()
    assert on_NLE[0].any(axis=0).all()  # not the same blocks in every layer
    used_G = np.bincount(split_placement(case, 0.0, seed=0).gpu_NLE[2].ravel() + 1)[1:]
    assert used_G.tolist() == [128, 128]


def test_layer_seconds_are_those_of_an_idle_cluster(case):
    lonely = alone(case)
    assert [request.id for request in lonely.requests] == [0, 1]
    costs, shape = case.cost_model, case.shape
    home_s, remote = layer_seconds(lonely, 0.0, seed=0)
    assert remote == 0.0
    least_s = costs.dense_s(0, 4) + 2 * costs.compute_s(0, 0, 1)
    most_s = costs.dense_s(0, 4) + shape.num_experts * costs.compute_s(0, 0, 4)
    assert least_s <= home_s <= most_s
    away_s, remote = layer_seconds(lonely, 1.0, seed=0)
    assert remote == 1.0
    # Two messages of one token at least, there and back.
    assert away_s > costs.dense_s(0, 4) + 2 * costs.send_s(0, 1, 1)


def test_other_machines_keep_requests_and_routing(case):
    moved = on_cluster(case, "prism", expert_memory_share=1.0)
    assert moved.requests is case.requests and moved.pools is case.pools
    assert copies(moved) > copies(case) > 1
    assert shape_entry(case.shape)["params"] == pytest.approx(46.4e9, rel=0.01)


def test_bad_settings_are_refused_before_anything_runs():
    for study, arguments, message in (
        ("fig5", {"seeds": 0}, "seeds"),
        ("fig5", {"remote_shares": (1.5,)}, "remote_shares must lie in"),
        ("fig6", {"methods": ("best",)}, "unknown method 'best'"),
        ("fig6", {"methods": "prism"}, "methods is 'prism', expected a list"),
        ("fig6", {"methods": ("uniform",)}, "expected 'prism' among them"),
        ("fig6", {"requests_per_server": 5}, "5 requests a server last 45 s, expected"),
        ("fig8", {"gpus": ()}, r"gpus is \(\), expected a list"),
        ("fig8", {"model": "gpt2"}, "gpt2"),
        ("fig8", {"workload": "mmlu"}, "unknown workload 'mmlu'"),
        ("prediction", {"apart": -0.1}, "apart must be 0 or more"),
        ("table2", {"keep": 1.5}, r"keep must lie in \[0, 1\], got 1.5"),
        ("table2", {"hysteresis": -0.1}, "hysteresis must be 0 or more"),
        ("table2", {"period_s": math.nan}, "period_s must be 0 or more"),
    ):
        one = find(f"prism_{study}")
        with pytest.raises(ConfigError, match=message):
            one.check(one.settings(**arguments))


def test_default_rule_of_migration_is_the_paper_s():
    expected = {"period_s": 300.0, "keep": 1.0, "hysteresis": 0.0}
    assert Migration().moving == expected


SMALL = {"requests_per_server": 5, "seeds": 2}
FEW = {"requests_per_server": 2, "seeds": 1}  # where there are many settings
TINY = {
    "prism_table1": {"methods": ("moe_infinity", "uniform")},
    "prism_table2": FEW,
    "prism_fig5": {"tokens": (1,), "remote_shares": (0.0, 1.0)},
    "prism_fig6": {"seeds": 1, "period_s": 20.0, "window_s": 10.0},
    "prism_fig7": {"seeds": 1, "period_s": 20.0, "window_s": 10.0, "keeps": (1.0,)},
    "prism_fig8": FEW | {"gpus": (4, 8), "mbps": (100.0, 1000.0)},
    "prism_prediction": FEW,
    "prism_sensitivity": FEW | {"skews": (1.0,), "memory_shares": (0.5, 0.8)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_whole_study_writes_a_valid_entry(tmp_path, name, monkeypatch):
    monkeypatch.setattr("moe_edge.simulate.cluster.build.POOL_TOKENS", 400)
    study = find(name)
    settings = study.settings(**SMALL | TINY[name])
    summary = run_study(study, settings, out_dir=str(tmp_path / name))
    result = validate_entry(tmp_path / name)
    check_answer(summary["answer"])
    assert json.loads(json.dumps(summary))["name"] == name
    assert (result["kind"], result["cost_model_source"]) == ("simulated", "preset")
    assert result["workload"]["comparable"] is False

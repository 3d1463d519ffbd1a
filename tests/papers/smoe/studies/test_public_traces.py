import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.metrics.frames import Rows, plain, tables
from moe_edge.papers.smoe.studies.public_traces import (
    KNOWN,
    KNOWN_SLOTS,
    STUDY,
    TraceSettings,
    derive,
    recall_all,
    replay_all,
    tell,
    trace_paths,
)
from tests.support.traces import one_layer

SIZES = (2, 3)


def small_trace():
    return one_layer([0, 1, 2], [0, 1, 3, 0, 1, 0, 2, 1], num_experts=4)


def test_replay_all_has_every_policy_without_scores():
    ratios = replay_all(small_trace(), SIZES)
    assert {"lru", "lfu", "belady", "static_oracle", "adapmoe_dp"} <= set(ratios)
    assert "smoe_score" not in ratios
    assert ratios["belady"][2] >= ratios["lru"][2]
    recall, precision = recall_all(small_trace())["oracle"]
    assert (recall, precision) == (1.0, 1.0)


def known_ratios(name):
    return {
        policy: dict(zip(KNOWN_SLOTS, values, strict=True))
        for policy, values in KNOWN[name].items()
    }


def derived(ratios, name="trace_qwen3_30b_a3b"):
    rows = Rows(STUDY.frames)
    tell(rows, name, ratios, {"oracle": (1.0, float("nan"))})
    assert rows.rows["ahead"] == [{"trace": name, "predictor": "oracle", "recall": 1.0}]
    return plain(derive(tables(rows.stored())))


def test_derive_gap_is_that_of_the_known_numbers():
    ratios = known_ratios("trace_qwen3_30b_a3b")
    assert derived(ratios)["gap"] == 0.0
    ratios["lfu"][32] += 0.125
    found = derived(ratios)
    assert found["gap"] == pytest.approx(0.125)
    assert [row["policy"] for row in found["best"]] == ["lfu", "lfu", "lru"]
    assert found["best"][1]["lru"] == 0.817 and found["best"][1]["belady"] == 0.912
    unknown = derived(ratios, "another")
    assert "gap" not in unknown and unknown["checks"] == {}


def test_derive_check_fails_beyond_the_tolerance():
    ratios = known_ratios("trace_qwen3_30b_a3b")
    assert list(derived(ratios)["checks"].values()) == [True]
    ratios["belady"][13] -= 0.006
    assert list(derived(ratios)["checks"].values()) == [False]


def test_trace_paths_missing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"traces is \(\), expected a list"):
        TraceSettings(traces=())
    with pytest.raises(OSError, match=r"nowhere.csv is not here .*--data_dir"):
        trace_paths(TraceSettings(traces=("nowhere.csv",), data_dir=str(tmp_path)))

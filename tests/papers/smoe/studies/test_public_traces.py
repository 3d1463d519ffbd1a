import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.papers.smoe.studies.public_traces import (
    KNOWN,
    TraceSettings,
    findings,
    recall_all,
    replay_all,
    trace_paths,
    worst_difference,
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


def test_worst_difference_is_that_of_the_known_numbers():
    name = "trace_qwen3_30b_a3b"
    ratios = {
        policy: dict(zip((13, 32, 64), values, strict=True))
        for policy, values in KNOWN[name].items()
    }
    assert worst_difference(name, ratios) == 0.0
    ratios["lfu"][32] += 0.25
    assert worst_difference(name, ratios) == pytest.approx(0.25)
    assert worst_difference("another", ratios) is None
    assert worst_difference(name, {"lru": {7: 0.5}}) is None


def test_findings_check_fails_beyond_the_tolerance(tmp_path):
    name = "trace_qwen3_30b_a3b"
    path = tmp_path / f"{name}.csv.gz"
    path.write_bytes(b"x")
    settings = TraceSettings(traces=(str(path),))
    ratios = {
        policy: dict(zip((13, 32, 64), values, strict=True))
        for policy, values in KNOWN[name].items()
    }
    found = findings({name: ratios}, {name: {}}, [path], settings)
    assert list(found.checks.values()) == [True]
    ratios["belady"][13] -= 0.006
    found = findings({name: ratios}, {name: {}}, [path], settings)
    assert list(found.checks.values()) == [False]


def test_trace_paths_missing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"traces is \(\), expected a list"):
        TraceSettings(traces=())
    with pytest.raises(OSError, match=r"nowhere.csv is not here .*--data_dir"):
        trace_paths(TraceSettings(traces=("nowhere.csv",), data_dir=str(tmp_path)))

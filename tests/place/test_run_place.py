"""The root of launch/place_experts.py."""

import json

import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.place import run_place as module
from moe_edge.place.plan import Placement
from moe_edge.place.policy import PLACERS
from moe_edge.place.run_place import parse_slots, run_place

ROWS = [("a", [10, 6, 3, 1]), ("b", [1, 2, 7, 10])]


@pytest.fixture
def counts(tmp_path):
    path = tmp_path / "counts.jsonl"
    with path.open("w") as file:
        for domain, numbers in ROWS:
            for layer in (0, 5):
                row = {"model": "m", "domain": domain, "layer": layer, "top_k": 2}
                row |= {"num_experts": 4, "tokens": 10, "counts": numbers}
                file.write(json.dumps(row) + "\n")
    return str(path)


def placed(tmp_path, counts, **changes):
    options = {"statistics": counts, "server_domains": "a,b", "slots": "5,6"}
    return run_place(out_dir=str(tmp_path / "o"), **(options | changes))


def test_run_place_compares_all_methods_and_writes_placements(tmp_path, counts, capsys):
    summary = placed(tmp_path, counts)
    methods = summary["methods"]
    assert set(methods) == set(PLACERS) - {"eplb"}
    assert "equal servers" in summary["left_out"]["eplb"]
    # Server a keeps its first two of each layer and one third, b all but one first.
    best = methods["optimal"]
    assert best["objective"] == pytest.approx((1 + 1 + 3) / 20 + (1 + 1) / 20)
    assert best["gap_pct"] == 0.0
    assert best["coverage"] == 1.0
    assert best["memory_use"] == 1.0
    for name, row in methods.items():
        on_NLE = np.load(tmp_path / "o" / f"placement_{name}.npy")
        assert on_NLE.dtype == bool
        assert on_NLE.shape == (2, 2, 4)
        share = np.array([numbers for _, numbers in ROWS])[:, None] / 20
        value = (share * ~on_NLE).sum()
        assert row["objective"] == pytest.approx(value)
        gap = 100 * (value - best["objective"]) / best["objective"]
        assert row["gap_pct"] == pytest.approx(gap, abs=1e-9)
        placement = Placement.load(tmp_path / "o" / f"placement_{name}")
        placement.check([np.array([5]), np.array([6])])
    stored = json.loads((tmp_path / "o" / "place.json").read_text())
    assert stored["methods"] == methods
    assert stored["slots"] == [[5], [6]]
    assert len(stored["statistics_sha256"]) == 64
    assert "optimal" in capsys.readouterr().out


def test_run_place_named_methods_only_and_several_gpus(tmp_path, counts):
    summary = placed(tmp_path, counts, methods="prism, optimal", slots="3+2,6")
    assert list(summary["methods"]) == ["prism", "optimal"]
    placement = Placement.load(tmp_path / "o" / "placement_optimal")
    placement.check([np.array([3, 2]), np.array([6])])


def test_run_place_server_without_memory_calls_the_others(tmp_path, counts):
    methods = placed(tmp_path, counts, slots="9,0")["methods"]
    assert set(methods) == set(PLACERS) - {"eplb"}
    for name, row in methods.items():
        assert row["coverage"] == 1.0
        on_NLE = np.load(tmp_path / "o" / f"placement_{name}.npy")
        assert on_NLE[0].all() and not on_NLE[1].any()


def test_run_place_block_is_told_or_assumed_in_words(tmp_path, counts):
    guessed = placed(tmp_path, counts, dry_run=True)
    assert guessed["block"] == [2048, 1024]
    assert "2048 x 1024 as OLMoE-1B-7B-0924's" in guessed["assumed"]
    told = placed(tmp_path, counts, d_model=8, expert_dim=4, dry_run=True)
    assert told["block"] == [8, 4]
    assert "blocks" not in told["assumed"]


def test_run_place_all_leaves_out_nothing_but_the_picky(tmp_path, counts, monkeypatch):
    def refuse(*args, **kwargs):
        raise ConfigError("broken statistics")

    monkeypatch.setattr(module.get_placer("greedy").__class__, "assign", refuse)
    with pytest.raises(ConfigError, match="broken statistics"):
        placed(tmp_path, counts)


def test_run_place_everything_everywhere_has_no_gap(tmp_path, counts):
    methods = placed(tmp_path, counts, slots="8,8")["methods"]
    assert methods["optimal"]["objective"] == 0.0
    assert methods["prism"]["gap_pct"] == 0.0
    assert methods["uniform"]["gap_pct"] is None


def test_run_place_preset_cluster_needs_no_data(tmp_path):
    summary = run_place(
        out_dir=str(tmp_path / "o"),
        model="mixtral_8x7b",
        methods="prism,optimal,latency",
    )
    rows = summary["methods"]
    assert rows["latency"]["predicted_s"] <= rows["optimal"]["predicted_s"]
    assert rows["prism"]["gap_pct"] >= 0
    assert np.load(tmp_path / "o" / "placement_latency.npy").shape == (3, 32, 8)


def test_run_place_dry_run_writes_nothing(tmp_path, counts):
    summary = placed(tmp_path, counts, dry_run=True)
    assert summary["dry_run"] is True
    assert summary["server_domains"] == ["a", "b"]
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"slots": "3,4"}, CapacityError, "hold 7 blocks, .* needs 8: 1 blocks"),
        ({"slots": "5,6,7"}, ConfigError, "given for 3 servers, there are 2"),
        ({"slots": "5," + "9" * 5000}, ConfigError, "--slots is '5,999"),
        (
            {"slots": "5,999999999999999999"},
            ConfigError,
            r"slots of server 1 are \[999",
        ),
        ({"slots": "5,-6"}, ConfigError, "--slots is '5,-6', expected whole"),
        ({"slots": None}, ConfigError, "--statistics needs --server_domains"),
        ({"server_domains": "a,c"}, ConfigError, "unknown domain 'c'; known: a, b"),
        ({"methods": "best"}, ConfigError, "unknown placer 'best'; known: eplb"),
        ({"methods": "eplb"}, ConfigError, "eplb needs equal servers"),
        ({"cluster": "prism"}, ConfigError, "needs --slots, not --cluster"),
        ({"d_model": 8}, ConfigError, "expert_dim is None; give both"),
        (
            {"statistics": None, "slots": None, "d_model": 8},
            ConfigError,
            "expert_dim belong to --statistics; presets",
        ),
        ({"statistics": None}, ConfigError, "--slots and --top_k belong to"),
        (
            {"statistics": None, "slots": None},
            ConfigError,
            "names 2 domains, cluster prism has 3 servers",
        ),
    ],
)
def test_run_place_bad_input_is_refused(tmp_path, counts, changes, error, message):
    with pytest.raises(error, match=message):
        placed(tmp_path, counts, **changes)
    assert not (tmp_path / "o").exists()


def test_parse_slots_plus_joins_the_gpus_of_a_server():
    assert [s.tolist() for s in parse_slots("80, 70,10+20+30")] == [
        [80],
        [70],
        [10, 20, 30],
    ]

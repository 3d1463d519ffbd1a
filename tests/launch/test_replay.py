import json

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.simulate.replay.run import run_replay
from tests.support.traces import PUBLIC_HEAD

# Two slots hold 0 and 1 after the prefill; then as in replay/test_hits.py.
EXPERTS = [0, 1, 0, 2, 0, 1, 2, 1]
LINES = [f"0,{int(s > 1)},{s},0,0,{e},1\n" for s, e in enumerate(EXPERTS)]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(PUBLIC_HEAD + "".join(LINES))
    return str(path)


def replayed(tmp_path, trace, **kwargs):
    options = {"slots_per_layer": "2", "num_experts": 4} | kwargs
    return run_replay(out_dir=str(tmp_path / "o"), trace=trace, **options)


def test_replay_prints_hit_ratios_last(run_script, trace, tmp_path):
    flags = ["--slots_per_layer", "2,3", "--policies", "lru,lfu,belady"]
    flags += ["--num_experts", 4, "--predictors", "previous", "--out_dir", "o"]
    done = run_script("replay", "--trace", "t.csv", *flags)
    ratios = done.summary["hit_ratio"]
    lines = done.stdout.splitlines()
    assert lines[0] == "hit ratio: of the experts used, the share in a slot"
    assert lines[1].split() == ["slots", "a", "layer", "2", "3"]
    assert lines[2].split() == ["lru", "0.500", "0.833"]
    assert {name: by_size["2"] for name, by_size in ratios.items()} == {
        "lru": 3 / 6,
        "lfu": 2 / 6,
        "belady": 4 / 6,
    }
    assert ratios["lru"]["3"] == 5 / 6
    assert done.summary["recall"] == {"previous": {"1": 0.0}}
    stored = json.loads((tmp_path / "o" / "replay.json").read_text())
    assert stored["hit_ratio"] == ratios
    assert stored["cache"]["lru"]["2"]["hits"] == 3
    assert stored["trace"]["decode_steps"] == 6
    assert len(stored["trace"]["sha256"]) == 64
    assert "replay.slots_per_layer = '2,3'" in (tmp_path / "o/config.gin").read_text()


def test_replay_says_what_drafts_would_move(trace, tmp_path, capsys):
    given = {"policies": "lru", "predictors": "", "drafts": "2"}
    with pytest.raises(ConfigError, match="drafts of 1 tokens, expected 2 or more"):
        replayed(tmp_path, trace, **given | {"drafts": "1"})
    (found,) = replayed(tmp_path, trace, **given)["drafts"].values()
    assert found["reused"] == 0.0 and found["break_even"]["0"] == 1.0
    assert "2 tokens a step: 0.000 of their choices shared" in capsys.readouterr().out


def test_replay_takes_all_whose_needs_the_trace_holds(trace, tmp_path, capsys):
    summary = replayed(tmp_path, trace)
    assert {"lru", "lfu", "belady", "static_oracle"} <= set(summary["hit_ratio"])
    assert {"previous", "oracle"} <= set(summary["recall"])
    assert summary["precision"]["moe_infinity"] == {"1": None}
    stored = json.loads((tmp_path / "o" / "replay.json").read_text())
    assert "smoe_score" in stored["left_out"]["policies"]
    assert "stale_gate" in stored["left_out"]["predictors"]
    assert "belady" in capsys.readouterr().out


@pytest.mark.parametrize(
    "given, text",
    [
        (
            {"policy_options": {"lru": {}}},
            "in policy_options 'lru'; known: suc",
        ),
        (
            {"policy_options": {"successor": {"discount": 2.0}}},
            "discount .*got 2.0",
        ),
        (
            {"predictor_options": {"frequency": {"decay": 0.0}}},
            "decay .*, got 0.0",
        ),
        ({"predictor_options": {"frequency": {"x": 1}}}, "frequency has no option 'x'"),
    ],
)
def test_replay_takes_options_by_name(trace, tmp_path, given, text):
    names = {"policies": "successor", "predictors": "frequency"}
    with pytest.raises(ConfigError, match=text):
        replayed(tmp_path, trace, **names, **given)


def test_replay_dry_run_reads_and_writes_nothing(trace, tmp_path):
    summary = replayed(tmp_path, trace, policies="lru", predictors="", dry_run=True)
    assert (summary["policies"], summary["predictors"]) == (["lru"], [])
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    "given, message",
    [
        ({"policies": "lru,fifo"}, "unknown cache policy 'fifo'; known: .*lfu, lru"),
        ({"predictors": "crystal"}, "unknown predictor 'crystal'; known: .*previous"),
        ({"policies": "smoe_score"}, "smoe_score needs scores, and the trace has only"),
        ({"predictors": "stale_gate"}, "stale_gate needs hidden"),
        ({"slots_per_layer": "1"}, "1 slots a layer, expected at least 2"),
        ({"slots_per_layer": "13,x"}, "slots_per_layer is '13,x', expected whole"),
        ({"slots_per_layer": "2.5"}, "slots_per_layer is '2.5', expected whole"),
        ({"slots_per_layer": ""}, "slots_per_layer is '', expected whole"),
        ({"horizon": 0}, "horizon must be a positive whole number, got 0"),
        ({"horizon": 2}, "horizon 2, expected at most the 1 layers"),
        ({"num_experts": 2}, "row 3: expert 2, .* in 0..1"),
        ({"num_experts": None}, "give --num_experts"),
    ],
)
def test_replay_rejects_bad_flags(trace, tmp_path, given, message):
    with pytest.raises(ConfigError, match=message):
        replayed(tmp_path, trace, **given)
    assert not (tmp_path / "o").exists()


def test_replay_rejects_a_trace_without_decoding(trace, tmp_path):
    (tmp_path / "t.csv").write_text(PUBLIC_HEAD + LINES[0])
    with pytest.raises(ConfigError, match="has no decode step"):
        replayed(tmp_path, trace)


def test_replay_bad_trace_is_one_line(run_script, tmp_path):
    (tmp_path / "t.csv.gz").write_text("turn,phase\n")
    flags = ["--trace", "t.csv.gz", "--slots_per_layer", "13", "--out_dir", "o"]
    assert "is no gzip file" in run_script("replay", *flags).error
    missing = run_script("replay", "--trace", "none.csv", *flags[2:]).error
    assert "--trace none.csv is not here and no --data_dir was given" in missing


def test_replay_refuses_slots_beyond_64_bits(tmp_path):
    with pytest.raises(ConfigError, match="slots_per_layer is 1000.* at most 64 bits"):
        run_replay(out_dir=tmp_path / "o", trace="t", slots_per_layer=f"2,1{'0' * 30}")

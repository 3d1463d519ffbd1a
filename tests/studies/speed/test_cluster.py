"""Suite `cluster`: rows of live runs by hand; calls and tokens of tiny models."""

import json

import pytest

from moe_edge.bench import live
from moe_edge.core.checks import ConfigError, MoeEdgeError
from moe_edge.studies.speed import cluster, cluster_live
from moe_edge.studies.speed.cluster import ClusterSettings, cluster_rows
from moe_edge.studies.speed.models import olmoe_config

TINY = olmoe_config(1, "float32", experts=8, hidden=48, heads=3) | {"vocab_size": 61}


def settings(*parts, **more) -> ClusterSettings:
    small = {"hf_config": TINY, "calls": 5, "local_steps": 3, "requests_per_server": 2}
    return ClusterSettings(**small | {"parts": parts, "repeats": 1} | more)


def token(t_s, dur_s, step):
    return {"kind": "compute", "t_s": t_s, "dur_s": dur_s, "step": step}


@pytest.fixture
def fake_live(monkeypatch):
    """Live runs that say what they were asked, and whose files are given."""
    asked, files = [], {}

    def fake(folder, **options):
        asked.append(options)
        folder.mkdir(parents=True)
        for name, rows in files.items():
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / name).write_text(text)
        failure = {"struck_s": 2.0, "detected_s": 2.25, "resumed_s": 3.0}
        row = {"payload_bytes": 1040, "activation_bytes": 1000}
        row |= {"interface_bytes": 1100, "moved_blocks": 2}
        return {
            "ready_at": live_time() + 15.0,
            "rows": {"optimal": row},
            "compiled_after_warmup": 0,
            "lost_requests": 0,
            "block_bytes": 62500,
            "failures": [failure] if "drill" in options else [],
        }

    live_time = cluster_live.time.time
    monkeypatch.setattr(cluster_live, "live_run", fake)
    return asked, files


def by_case(rows) -> dict[str, dict]:
    return {row["case"]: row for row in rows}


def test_bytes_are_held_against_what_calls_carry(fake_live, tmp_path):
    rows = by_case(cluster_rows(settings("bytes"), tmp_path))
    payload, interface = rows["bytes, payload"], rows["bytes, interface at 500 Mbit/s"]
    assert payload["ratio"] == pytest.approx(1.04) and payload["bar"] == 1.05
    assert interface["ratio"] == pytest.approx(1.1) and interface["bar"] == 1.15
    assert fake_live[0][0]["link_mbps"] == 500.0


def test_losses_count_from_the_strike_on(fake_live, tmp_path):
    rows = by_case(cluster_rows(settings("losses"), tmp_path))
    assert [options.get("drill") for options in fake_live[0]] == [
        *(None, "kill:1@40", "stop:1@40")
    ]
    assert rows["kill, noticed"]["ours"] == 0.25
    assert rows["kill, noticed"]["limit_fraction"] == 0.5
    assert rows["stop, its request goes on"]["ours"] == 1.0
    start = rows["start of four processes, warm"]
    assert start["ours"] == pytest.approx(15.0, abs=1.0) and start["bar"] == 30.0


def test_tokens_while_blocks_move_are_held_against_the_others(fake_live, tmp_path):
    moved = {"kind": "transfer", "t_s": 1.0, "dur_s": 0.002}
    fake_live[1]["events_optimal.jsonl"] = [
        *(token(0.0, 0.5, 0), token(0.5, 0.01, 1), token(1.0, 0.03, 2), moved)
    ]
    change = {"begun_s": 1.01, "t_s": 1.5, "moves": [[0, 1, 2]]}
    fake_live[1]["migrations_optimal.jsonl"] = [change]
    rows = by_case(cluster_rows(settings("migration"), tmp_path))
    tail = rows["token, p99, while blocks move"]
    assert tail["tokens"] == [1, 1] and tail["ratio"] == pytest.approx(3.0)
    block = rows["block while all serve, 500 Mbit/s"]
    assert block["ours"] == pytest.approx(2.0) and block["ratio"] == pytest.approx(2.0)


def test_a_part_that_cannot_be_measured_says_so(
    fake_live, tmp_path, capsys, monkeypatch
):
    fake_live[1].update({"events_optimal.jsonl": [], "migrations_optimal.jsonl": []})
    assert cluster_rows(settings("migration"), tmp_path) == []
    assert "not measured: migration: 0 tokens came" in capsys.readouterr().out

    def refuse(*_, **__):
        raise MoeEdgeError("no rights")

    monkeypatch.setattr(cluster_live, "live_run", refuse)
    assert cluster_rows(settings("bytes"), tmp_path) == []
    assert "not measured: bytes: no rights" in capsys.readouterr().out


def test_unknown_parts_are_refused():
    with pytest.raises(ConfigError, match="unknown part 'speed'; known: block, bytes"):
        ClusterSettings(parts=("speed",))


def test_kept_compiled_puts_the_environment_back(monkeypatch, tmp_path):
    monkeypatch.delenv(live.CACHE, raising=False)
    with live.kept_compiled(tmp_path):
        assert live.os.environ[live.CACHE] == str(tmp_path)
    assert live.CACHE not in live.os.environ
    monkeypatch.setenv(live.CACHE, "mine")
    with live.kept_compiled(tmp_path):
        assert live.os.environ[live.CACHE] == "mine"
    assert live.os.environ[live.CACHE] == "mine"


@pytest.mark.slow
def test_calls_and_tokens_are_timed(tmp_path, monkeypatch):
    models = cluster.cluster_models(settings("calls"), tmp_path)
    tiny = [(name, models[1][1]) for name in ("tiny", "again")]
    monkeypatch.setattr(cluster, "cluster_models", lambda *_: tiny)
    rows = by_case(cluster_rows(settings("calls", "local"), tmp_path))
    call = rows["call, D = 48, median"]
    hidden, answers = 4 * 48, 8 * 4 * 48
    assert 0 < call["bytes"][0] - hidden < 200 and 0 < call["bytes"][1] - answers < 200
    assert call["peer"] > 0 and call["compute_ms"] > 0
    assert rows["token, tiny, all blocks here"]["ratio"] > 0

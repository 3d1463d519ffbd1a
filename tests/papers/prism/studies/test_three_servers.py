"""Study `prism_three_servers`: shares of time by hand, refusals, an entry, made up."""

import json

import pytest

from moe_edge.bench.registry import find
from moe_edge.bench.study import run_study
from moe_edge.core.checks import MoeEdgeError
from moe_edge.metrics.frames import Rows, tables
from moe_edge.metrics.schema import validate_entry
from moe_edge.papers.prism.studies import live_seeds, three_servers
from moe_edge.papers.prism.studies.live_shares import time_shares
from moe_edge.papers.prism.studies.served import EPLB, OPTIMUM, OURS

STUDY = find("prism_three_servers")


def event(kind, request, t_s, dur_s, server=0):
    return {"kind": kind, "request": request, "t_s": t_s, "dur_s": dur_s} | {
        "server": server
    }


def events(slower=1.0):
    """Request 0 takes from 0 to 4, request 1 waits for it from 3 on and ends at 8; two
    calls of a layer overlap."""
    tokens = [(0, 0, 3), (0, 3, 1), (1, 3, 4), (1, 7, 1)]
    calls = [(0, 0.5, 1.0), (0, 1.0, 1.0), (1, 5.0, 0.5), (1, 5.5, 0.5)]
    kinds = ("compute", tokens), ("call", calls)
    return [
        event(kind, request, slower * t_s, slower * dur_s)
        for kind, rows in kinds
        for request, t_s, dur_s in rows
    ]


def write_events(folder, method, rows):
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"events_{method}.jsonl").write_text(text)


def test_shares_of_time_by_hand(tmp_path):
    write_events(tmp_path, "a", [*events(), event("transfer", None, 0.0, 9.0)])
    shares = time_shares(tmp_path, "a", {"call_overhead_s": 0.2})
    # 4 + 5 seconds; queue 1; waits 1.5 of one layer, then 0.5 and 0.5 of two.
    expected = {"queue": 1.0, "own server": 5.5, "messages": 0.6}
    expected["others' computation"] = 1.9
    assert shares == pytest.approx({k: v / 9 for k, v in expected.items()})
    alone = time_shares(tmp_path, "a", {"call_overhead_s": None})
    assert alone["messages"] == 0.0 and sum(alone.values()) == pytest.approx(1.0)


SECONDS = {OPTIMUM: 1.0, OURS: 1.1, EPLB: 1.5}  # measured, at seed 0
LOCAL = {OPTIMUM: 0.56, OURS: 0.55, EPLB: 0.44}
COMPUTED = {OPTIMUM: 1.05, OURS: 1.1, EPLB: 1.35}


def rows_of(seconds, seed):
    return {
        method: {
            "latency_s_N": [s + seed, s + seed, s + seed],
            "mean_latency_s": s + seed,
            "local_ratio": LOCAL[method],
            "remote_calls": 100,
            "call_overhead_s": 0.1,
            "error_pct": 1.0,
        }
        for method, s in seconds.items()
    }


@pytest.fixture
def fake_runs(monkeypatch):
    """Live runs and simulated ones of the seconds above; `facts` may be changed."""
    facts = {"lost_requests": 0, "failures": [], "compiled_after_warmup": 0}
    facts |= {"same_tokens": True, "processors": ["one"]}
    asked = []

    def live(folder, **options):
        asked.append(options)
        for method in SECONDS:
            write_events(folder, method, events(SECONDS[method]))
        return facts | {"rows": rows_of(SECONDS, options["seed"])}

    def simulated(run, cluster_run, names, options):
        return {"methods": rows_of(COMPUTED, int(cluster_run[-1]))}

    monkeypatch.setattr(live_seeds, "live_run", live)
    monkeypatch.setattr(three_servers, "run_recorded", simulated)
    return facts, asked


def settings(**more):
    return STUDY.settings(**{"methods": tuple(SECONDS), "seeds": 2} | more)


def test_an_entry_says_what_was_measured_and_simulated(fake_runs, tmp_path):
    summary = run_study(STUDY, settings(), out_dir=str(tmp_path / "out"))
    result = validate_entry(tmp_path / "out")
    assert result["kind"] == "emulated" and result["seeds"] == [0, 1]
    assert [options["seed"] for options in fake_runs[1]] == [0, 1]
    assert fake_runs[1][0]["methods"] == f"{OPTIMUM},{OURS},{EPLB}"
    checks = summary["checks"]
    assert checks[f"target: {OPTIMUM} keeps 0.08 more pairs local than {EPLB}"]
    assert checks[f"target: {OURS} is faster than {EPLB} in every seed"]
    assert checks["simulated within 10 % of measured"]  # medians of -10 and -6 %
    frames = tables(result["frames"])
    errors = frames["errors"].set_index("method").error_pct
    assert errors[EPLB] == pytest.approx(-8.0)
    order = "the simulator's order where methods differ by more than 10 %"
    assert checks[order]
    away = frames["changes"].set_index("method").remote
    assert away[OPTIMUM] - 1 == pytest.approx(-0.214, abs=5e-4)
    servers = frames["servers"].set_index(["method", "server"]).seconds
    assert servers[EPLB, "all"] == 2.0
    assert OPTIMUM in summary["answer"]


def test_a_wrong_order_and_a_large_error_are_told(fake_runs, tmp_path, monkeypatch):
    monkeypatch.setitem(COMPUTED, EPLB, 0.4)
    summary = run_study(STUDY, settings(seeds=1), out_dir=str(tmp_path / "out"))
    failed = {name for name, passed in summary["checks"].items() if not passed}
    assert failed == {
        "simulated within 10 % of measured",
        "simulated within 20 % of measured",
        "the simulator's order where methods differ by more than 10 %",
    }


def test_lost_requests_end_the_study(fake_runs, tmp_path):
    fake_runs[0]["lost_requests"] = 2
    with pytest.raises(MoeEdgeError, match="seed 0: 2 requests were lost"):
        STUDY.measure(settings(keep_dir=str(tmp_path)), Rows(STUDY.frames))


def test_bad_settings_are_refused_before_anything_runs():
    for arguments, message in (
        ({"methods": ("best",)}, "unknown method 'best'"),
        ({"link_mbps": -1.0}, "link_mbps must be positive"),
        ({"slots": "1,1"}, "expected one number for each of the 3 servers"),
        ({"slots": "10,10,10"}, "leave room for 27 blocks"),
        ({"workload": "arithmetic,poems"}, "unknown workload 'poems'"),
    ):
        with pytest.raises(MoeEdgeError, match=message):
            STUDY.check(STUDY.settings(**arguments))

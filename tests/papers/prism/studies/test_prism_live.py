"""Studies table1_live, fig5_live and fig7_live: sums by hand, entries of made-up runs,
refusals."""

import json

import numpy as np
import pytest

from moe_edge.bench.live import read_lines, token_times_s
from moe_edge.bench.registry import find
from moe_edge.bench.study import run_study
from moe_edge.core.checks import MoeEdgeError
from moe_edge.metrics.frames import tables
from moe_edge.metrics.schema import check_answer, validate_entry
from moe_edge.papers.prism.studies import live_seeds, table1_live_entry
from moe_edge.papers.prism.studies.fig5_live import Layers
from moe_edge.papers.prism.studies.live_shares import queued_s
from moe_edge.papers.prism.studies.live_tokens import local_by_request, read_tokens
from moe_edge.workload.cluster_run import TableChange, write_migrations
from moe_edge.workload.trace_writer import write_trace
from tests.support.cluster_runs import cluster_trace
from tests.support.entries import row_of, rows_of

FACTS = {"lost_requests": 0, "failures": [], "compiled_after_warmup": 0}
FACTS |= {"same_tokens": True, "processors": ["one"], "block_bytes": 750_000}
FACTS |= {"top_k": 2, "num_layers": 2}
BY_SHARE = [[0, 1]], [[0, 2]], [[2, 3]]  # chosen blocks; 2 and 3 are of others
AWAY = (np.arange(3)[:, None, None] + [[[0, 0, 1, 1]]]) % 3  # holders by server, block


def write_files(folder, method, shares, seconds_of, begins_s=None):
    """Events and trace of requests that get a prompt of one token.

    Args:
      shares: for every request the entry of BY_SHARE of each of its tokens.
      seconds_of: (request, token) -> how long it took.
      begins_s: of every request; None: at 0, on servers of their own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    servers = [r * 3 // len(shares) for r in range(len(shares))]
    ids = [[BY_SHARE[n] * 2 for n in tokens] for tokens in shares]
    holder_XLE = np.repeat(AWAY, 2, axis=1)
    trace = cluster_trace(ids, servers, [1] * len(ids), holder_XLE)
    write_trace(folder / f"trace_{method}.csv.gz", trace)
    lines = []
    for request, tokens in enumerate(shares):
        t_s, arrived_s = (begins_s or {}).get(request, 0.0), 0.0
        for step in range(len(tokens)):
            end_s = t_s + seconds_of(request, step)
            begun_s = t_s if step else arrived_s
            event = {"kind": "compute", "request": request, "step": step}
            event |= {"server": servers[request], "t_s": begun_s}
            lines.append(json.dumps(event | {"dur_s": end_s - begun_s}) + "\n")
            t_s = end_s
    (folder / f"events_{method}.jsonl").write_text("".join(lines))


def test_tokens_of_a_run_by_hand(tmp_path):
    shares = [[0, 1, 2], [0, 2, 2], [2, 0, 1]]  # the first is the prompt's
    write_files(tmp_path, "a", shares, lambda request, step: 1.0 + request + step)
    tokens = read_tokens(tmp_path, "a")
    assert tokens.request_T.tolist() == [0, 0, 1, 1, 2, 2]
    assert tokens.remote_T.tolist() == [0.5, 1.0, 1.0, 1.0, 0.0, 0.5]
    assert tokens.seconds_T.tolist() == [2.0, 3.0, 3.0, 4.0, 4.0, 5.0]
    assert local_by_request(tmp_path, "a") == pytest.approx([0.5, 1 / 3, 0.5])
    events = (tmp_path / "events_a.jsonl").read_text().splitlines()
    (tmp_path / "events_a.jsonl").write_text("\n".join(events[:-1]) + "\n")
    with pytest.raises(MoeEdgeError, match="5 decoded tokens in the events of a, 6 in"):
        read_tokens(tmp_path, "a")


def test_token_times_and_queues_by_hand():
    tokens = [(0, 0.0, 9.0), (1, 9.0, 1.0), (2, 10.0, 2.0), (3, 12.0, 3.0)]
    events = [
        {"kind": "compute", "step": step, "t_s": t_s, "dur_s": dur_s}
        for step, t_s, dur_s in tokens
    ]
    assert token_times_s(events, [(9.5, 9.6), (14.0, 20.0)]) == ([1.0, 3.0], [2.0])
    spans = {0: (0, 0.0, 4.0), 1: (0, 1.0, 6.0), 2: (1, 5.0, 7.0), 3: (0, 8.0, 9.0)}
    assert queued_s(spans) == {0: 0.0, 1: 3.0, 2: 0.0, 3: 0.0}


SECONDS = {  # of servers 1, 2, 3
    "moe_infinity": [3.0, 2.0, 1.0],
    "moe_infinity_lb": [2.0, 2.0, 1.0],
    "uniform": [1.5, 1.4, 1.3],
}


@pytest.fixture
def live(monkeypatch):
    """Live runs of each study, made up; gives the options that were asked."""
    asked = []

    def install(write):
        def run(folder, **options):
            asked.append(options)
            return FACTS | write(folder, options)

        monkeypatch.setattr(live_seeds, "live_run", run)
        return asked

    return install


@pytest.fixture
def link(monkeypatch):
    """A host link of a rate; a layer takes 5 ms."""

    def host_link(factor):
        return 150e6 / factor, 0.005

    monkeypatch.setattr(table1_live_entry, "host_link", host_link)


def table_run(folder, options):
    rows = {}
    for method, seconds in SECONDS.items():
        row = {"latency_s_N": seconds, "mean_latency_s": float(np.mean(seconds))}
        alone = method != "uniform"
        row |= {"local_ratio": 1.0 if alone else 0.25, "remote_calls": 9}
        row["call_overhead_s"] = None if alone else 0.001
        rows[method] = row | (
            {"hit_ratio": 0.5, "host_bytes": 10**7, "redirected": 2} if alone else {}
        )
    return {"rows": rows}


def entry(name, tmp_path, **settings):
    study = find(name)
    summary = run_study(
        study, study.settings(**settings), out_dir=str(tmp_path / "out")
    )
    check_answer(summary["answer"])
    return summary, validate_entry(tmp_path / "out")


def test_table1_tells_signs_and_the_rate_of_the_host_link(live, link, tmp_path):
    asked = live(table_run)
    summary, result = entry("prism_table1_live", tmp_path, seeds=2)
    assert result["kind"] == "emulated" and result["seeds"] == [0, 1]
    assert [options["methods"].split(",")[0] for options in asked] == [
        "moe_infinity",
        "moe_infinity_lb",
    ]
    assert asked[0]["host_bytes_per_s"] == 75e6 and asked[0]["link_mbps"] == 500.0
    change = {row["method"]: row["change"] for row in summary["numbers"]["changes"]}
    assert change["uniform"] == pytest.approx(-0.3)
    page = (tmp_path / "out" / "README.md").read_text()
    assert "memory: 75 MB/s. A block\nof 750 kB takes 2 times" in page
    assert result["workload"]["layer_compute_s"] == 0.005
    failed = {name for name, passed in summary["checks"].items() if not passed}
    assert failed == set()  # the paper's signs, server by server
    seconds = [r["seconds"] for r in rows_of(result, "servers", method="uniform")]
    assert seconds == pytest.approx([1.5, 1.4, 1.3, 1.4])
    assert row_of(result, "methods", method="uniform")["overhead_ms"] == 1.0
    assert row_of(result, "methods", method="moe_infinity")["host_mb"] == 10.0


def test_table1_tells_another_order(live, link, tmp_path, monkeypatch):
    live(table_run)
    monkeypatch.setitem(SECONDS, "uniform", [3.5, 1.4, 0.9])
    summary, _ = entry("prism_table1_live", tmp_path, seeds=1)
    failed = {name for name, passed in summary["checks"].items() if not passed}
    assert failed == {
        "target: means in the paper's order",
        "target: together is faster on server 1",
        "target: alone is faster on server 3",
    }


def share_run(folder, options):
    """A layer takes 1 ms, and 2 ms more where all its pairs are remote."""
    kinds = [0] + [0, 1, 2] * 8

    def seconds(request, step):
        return (0.002, 0.004, 0.006)[kinds[step]]

    for method in options["methods"].split(","):
        write_files(folder, method, [kinds] * 3, seconds)
    return {}


def test_the_slope_within_requests_leaves_out_what_whole_requests_share():
    remote_T = np.array([0.0, 0.5, 0.5, 1.0])
    layers = Layers(np.array([1.0, 2.0, 10.0, 11.0]), remote_T, np.array([0, 0, 1, 1]))
    everything = np.arange(4)
    assert layers.within(everything) == pytest.approx(2.0)
    assert layers.line(everything)[0] == pytest.approx(10.0)
    drawn = layers.resampled(seed=0)
    assert {tuple(sorted(set(rows.tolist()))) for rows in drawn} == {
        (0, 1),
        (2, 3),
        (0, 1, 2, 3),
    }


def test_fig5_finds_the_slope(live, tmp_path):
    live(share_run)
    summary, result = entry("prism_fig5_live", tmp_path, seeds=1, bins=4)
    whole = summary["numbers"]["whole"]
    bounds = [whole[f"slope_ms{end}"] for end in ("", "_low", "_high")]
    assert bounds == pytest.approx([2.0, 2.0, 2.0])
    bins = rows_of(result, "bins", method="all")
    assert {row["remote"]: row["layer_ms"] for row in bins} == pytest.approx(
        {"0-25": 1.0, "50-75": 2.0, "75-100": 3.0}
    )
    assert summary["numbers"]["times"] == pytest.approx(3.0)
    assert all(summary["checks"].values())
    found = tables(result["frames"])["bins"]
    assert set(found.layer_ms_n) == {48, 24}  # of both methods, of each


def changing_run(folder, options):
    """Two requests a half and server. The first of the new data is remote, the second
    half so, unless blocks move in time; what is remote takes 2 s instead of 1."""
    with_it = options["period_s"] < 100
    prompts = read_lines(folder.parent / "prompts_0.jsonl")
    assert [line["server"] for line in prompts] == [0] * 4 + [1] * 4 + [2] * 4
    kinds = [0, 0, 2, 0 if with_it else 1] * 3
    needs_s = [2.0 if kind else 1.0 for kind in kinds]
    begins_s = {r: sum(needs_s[r // 4 * 4 : r]) for r in range(12)}
    shares = [[kind] * 3 for kind in kinds]

    def seconds(request, step):
        return needs_s[request] / 4 * (1 if step else 2)

    write_files(folder, "prism", shares, seconds, begins_s)
    move = TableChange(t_s=3.7, version=1, moves=[[0, 0, 2]], begun_s=3.6)
    write_migrations(folder / "migrations_prism.jsonl", [move] if with_it else [])
    row = {"migrations": int(with_it), "moved_blocks": int(with_it)}
    return {"rows": {"prism": row}}


def test_fig7_compares_halves_with_and_without(live, tmp_path):
    asked = live(changing_run)
    settings = {"seeds": 1, "requests_per_server": 2, "keeps": (1.0, 0.0)}
    summary, result = entry("prism_fig7_live", tmp_path, **settings)
    assert [options["period_s"] for options in asked] == [1e6, 3.0, 3.0]
    assert [options["keep"] for options in asked] == [1.0, 1.0, 0.0]
    assert "workload" not in asked[0] and asked[0]["slots"] == asked[1]["slots"]
    part = {(row["variant"], row["part"]): row for row in rows_of(result, "parts")}
    assert part["no migration", "all"]["seconds"] == 1.5
    assert part["keep 1", "all"]["seconds"] == 1.25
    for row in result["numbers"]["changes"]:
        assert row["change"] == pytest.approx(-1 / 6)
    assert part["keep 1", "after"]["local"] == 0.5
    assert part["keep 1", "before"]["over"] == 1.0
    assert part["keep 1", "after"]["over"] == 0.75
    assert part["no migration", "after"]["local"] == 0.25
    moving = row_of(result, "tokens", when="while blocks move")
    assert moving["p99_ms"] == 500.0 == result["numbers"]["tails"]["otherwise"]
    assert all(summary["checks"].values()), summary["checks"]
    requests = rows_of(result, "requests", variant="no migration")
    assert [row["seconds"] for row in requests] == [1.0, 1.0, 2.0, 2.0]


def test_fig7_says_so_if_nothing_moved(live, tmp_path):
    live(lambda folder, o: changing_run(folder, o | {"period_s": 1e6}))
    settings = {"seeds": 1, "requests_per_server": 2, "keeps": (1.0, 0.0)}
    summary, result = entry("prism_fig7_live", tmp_path, **settings)
    assert not any(
        passed for name, passed in summary["checks"].items() if "compiled" not in name
    )
    assert "moving" not in result["numbers"]["tails"]
    page = (tmp_path / "out" / "README.md").read_text()
    assert "No token came while blocks moved." in page


def test_bad_settings_are_refused_before_anything_runs():
    for study, arguments, message in (
        ("table1", {"methods": ("moe_infinity",)}, "expected 'moe_infinity' and 'unif"),
        ("table1", {"methods": ("best", "uniform")}, "unknown method 'best'"),
        ("table1", {"link_factor": 0.0}, "link_factor must be positive"),
        ("table1", {"slots": "130,130,1"}, "slots"),
        ("fig5", {"methods": ("moe_infinity",)}, "unknown method 'moe_infinity'"),
        ("fig5", {"bins": 0}, "bins"),
        ("fig7", {"then_workload": "words"}, "then_workload names 1 task families"),
        ("fig7", {"then_workload": "words,words,arithmetic"}, "a server has 'words'"),
        ("fig7", {"then_workload": "words,poems,tables"}, "task family 'poems'"),
        ("fig7", {"method": "best"}, "unknown method 'best'"),
        ("fig7", {"source": "moon"}, "unknown source 'moon'"),
        ("fig7", {"keeps": (2.0,)}, "keeps must lie in"),
        ("fig7", {"period_s": 0.0}, "period_s must be positive"),
        ("fig7", {"slots": "10,10,10"}, "two slots of each server stay free"),
    ):
        one = find(f"prism_{study}_live")
        with pytest.raises(MoeEdgeError, match=message):
            one.check(one.settings(**arguments))

"""Numbers, pages and pictures of the timed studies, from runs made by hand."""

import dataclasses
import itertools
import sys
import types

import numpy as np
import pytest

from moe_edge.bench.cases import (
    Case,
    Ready,
    count_history,
    describe_link,
    linked,
    on_link,
)
from moe_edge.bench.prompts import PromptPool
from moe_edge.bench.rounds import ON_TIME
from moe_edge.bench.started import started
from moe_edge.bench.timed_cases import Timed, TimedSettings, Timing
from moe_edge.core.checks import ConfigError
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.evaluate.agreement import Agreement
from moe_edge.metrics.frames import Rows
from moe_edge.offload.link import EmulatedLink, TransferLink
from moe_edge.papers.smoe.studies import fig11, fig12, fig14, systems, ttft
from moe_edge.papers.smoe.studies.score_classes import Brought
from tests.support.entries import page_of, result_of, row_of

SETTINGS = fig14.BudgetSettings(budgets=("25%", "50%"), batches=(1,), rounds=2)
POOL = PromptPool([[1]], [{"path": "p", "sha256": "0"}])
PROFILE = np.ones((2, 4))
LINK = EmulatedLink(1e6, 1e-4)
FIDELITY = Agreement(90, 0.9, (0.85, 0.95), 1.1, (1.0, 1.2), 5.0, 0.1)


def make_timing(policies, tpot_of, ratio_of) -> Timing:
    timed = {}
    for policy, options in policies.items():
        for budget in SETTINGS.budgets:
            case = Case(policy, budget, 1, options)
            scale = 2.0 if budget == "25%" else 1.0
            timed[case.key] = Timed(
                case,
                tpot_s=[scale * tpot_of[policy]] * 2,
                hit_ratio=[ratio_of[policy]] * 2,
                step_bytes=[1e6, 3e6],
                is_same=[True, True],
                link_s=[scale * 4e-3] * 2,
                wait_s=[scale * 0.8 * tpot_of[policy]] * 2,
                host_s=[1e-3, 3e-3],
                fidelity=None if case.is_exact else FIDELITY,
            )
    ready = Ready([], [], 1e-3, LINK, POOL)
    return Timing(timed, {1: [2e-3, 4e-3]}, ready, {ON_TIME: True})


def entry_of(study, timing, *more):
    """What a study's `tell` and a timing give: rows, result, page, pictures."""
    rows = Rows(study.frames)
    timing.tell(rows, {}, SETTINGS)
    sys.modules[study.derive.__module__].tell(rows, timing, *more)
    result = result_of(study, rows)
    return rows, result, *page_of(study, result)


def ablation():
    steps = (*fig14.STEPS, fig14.ON_CPU)
    tpot = dict(zip(steps, (10e-3, 9e-3, 6e-3, 6e-3, 3e-3, 5e-3), strict=True))
    ratio = dict(zip(steps, (0.4, 0.5, 0.8, 0.9, 0.9, 0.4), strict=True))
    options = fig14.bases(PROFILE) | fig14.smoe_steps(0.2)
    return make_timing(options, tpot, ratio)


def test_fig14_steps_change_one_thing_each():
    steps = [
        *fig14.bases(PROFILE).values(),
        *fig14.smoe_steps(0.3).values(),
    ]
    fields = [field.name for field in dataclasses.fields(OffloadOptions)]
    changed = [
        {f for f in fields if str(getattr(old, f)) != str(getattr(new, f))}
        for old, new in itertools.pairwise([steps[0], *steps[2:]])
    ]
    assert changed == [
        {"eviction", "eviction_options"},
        {"route", "route_options"},
        {"predictor", "predictor_options"},
        {"assist"},
    ]
    assert steps[-1].predictor_options == {"top_a": 0.3}
    exact = [Case("", "25%", 1, options).is_exact for options in steps]
    assert exact == [True, False, True, False, False, False]


def test_fig14_compares_each_step_with_the_one_before(tmp_path):
    seen = Brought(low=0.5, top_absent=0.1, low_absent=0.3, low_of_absent=0.75)
    watched = {key: seen for key in ablation().timed}
    rows, result, page, figures = entry_of(fig14.STUDY, ablation(), watched)
    step = {row["policy"]: row for row in result["numbers"]["step"]}
    assert step["+CE"]["tpot"] == pytest.approx(-0.1)
    assert step["+CE"]["hit"] == pytest.approx(0.25)
    assert step["+BA"]["tpot"] == pytest.approx(-0.5)
    assert step["+CR"]["hit"] == pytest.approx(0.6)
    at = {"budget": "25%", "batch": 1}
    base, lossy, exact = (
        row_of(result, "timing", policy=policy, **at)
        for policy in ("base", "+CR", "+CE")
    )
    assert base["tpot_ms"] == pytest.approx(20) and base["moved_mb"] == 2
    assert lossy["agreement"] == 0.9 and "agreement" not in exact
    resident = row_of(result, "timing", policy="resident", budget="100%")
    assert resident["tpot_ms"] == pytest.approx(3)
    brought = row_of(result, "choices", policy="+BA", **at)
    assert brought["low_absent"] == 0.3
    assert "| low-score loading | 42% | 60% | | top-score loading | 29% | 20% |" in page
    assert "| +Pre | 0.10 | 0.30 | 4.00 | 6.00 | 2.00 |" in page
    assert "batch 1: +CE -10%, +CR" in page
    assert all(rows.checks.values())
    assert rows.about["workload"]["budgets"] == ("25%", "50%")
    assert not {"checkpoint", "sources", "link_factor"} & set(rows.about["workload"])
    figures.draw(tmp_path)
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_fig14_says_where_a_host_that_computes_beats_the_whole_of_smoe():
    timing = ablation()
    seen = Brought(low=0.5, top_absent=0.1, low_absent=0.3, low_of_absent=0.75)
    watched = {key: seen for key in timing.timed}
    _, _, page, _ = entry_of(fig14.STUDY, timing, watched)
    assert "every round of 0 of 2 settings" in page
    timing[fig14.ON_CPU, "50%", 1].tpot_s[:] = [2e-3, 2e-3]
    _, _, page, _ = entry_of(fig14.STUDY, timing, watched)
    assert "every round of 1 of 2 settings" in page
    timing[fig14.ON_CPU, "25%", 1].tpot_s[:] = [2e-3, 2e-3]
    _, _, page, _ = entry_of(fig14.STUDY, timing, watched)
    assert "every round of all 2 settings" in page
    timing[fig14.ON_CPU, "50%", 1].tpot_s[1] = 4e-3
    _, _, page, _ = entry_of(fig14.STUDY, timing, watched)
    assert "every round of 1 of 2 settings" in page


def test_timing_checks_name_a_case_with_other_tokens():
    timing = ablation()
    timing["+CR", "25%", 1].is_same[0] = False  # lossy: it may
    assert all(timing.checks().values())
    timing["+CE", "25%", 1].is_same[0] = False
    assert list(timing.checks().values()) == [False, True]
    late = dataclasses.replace(timing, on_time={ON_TIME: False})
    assert list(late.checks().values()) == [False, False]


def test_fig12_holds_the_better_smoe_against_the_best_baseline(tmp_path):
    config = types.SimpleNamespace(
        moe=types.SimpleNamespace(top_k=2), moe_layers=(0, 1)
    )
    named = fig12.policies(0.2, PROFILE, config, horizons=(1, 3))
    assert {options.slot_plan for name, options in named.items() if "LFU" in name} == {
        "one_pool",
        "equal",
    }
    assert named["MoE-Infinity, 3 ahead, equal slots"].horizon == 3
    best = {"LFU, equal slots": 0.5, "SMoE, one pool": 0.9, "SMoE, equal slots": 0.6}
    ratio = dict.fromkeys(named, 0.4) | best
    timing = make_timing(named, dict.fromkeys(named, 1e-2), ratio)
    _, result, page, figures = entry_of(fig12.STUDY, timing)
    gain, _ = result["numbers"]["gain"]
    assert gain["policy"] == "SMoE, one pool" and gain["over"] == pytest.approx(1.8)
    assert gain["baseline"] == "LFU, equal slots" and not gain["none"]
    assert "| 25%, batch 1 | SMoE, one pool | 0.9 | LFU, equal slots | 0.5 |" in page
    assert "ratio is +80% over" in page and "No difference" not in page
    figures.draw(tmp_path)
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_fig12_calls_a_difference_within_the_rounds_none():
    config = types.SimpleNamespace(
        moe=types.SimpleNamespace(top_k=2), moe_layers=(0, 1)
    )
    named = fig12.policies(0.2, PROFILE, config)
    timing = make_timing(named, dict.fromkeys(named, 1e-2), dict.fromkeys(named, 0.5))
    for budget in SETTINGS.budgets:
        timing["SMoE, one pool", budget, 1].hit_ratio = [0.45, 0.6]
    *_, page, _ = entry_of(fig12.STUDY, timing)
    assert "beyond the rounds' spread: 25%, batch 1; 50%, batch 1." in page


def test_count_history_counts_tokens_and_drops_padding():
    history = [{1: np.array([[0, 2], [2, 3]])}, {1: np.array([[0, 3]])}]
    counts = count_history(history, num_layers=2, num_experts=3)
    assert counts.tolist() == [[0, 0, 0], [2, 0, 2]]


def test_ttft_compares_with_layerwise(tmp_path):
    rows = Rows(ttft.STUDY.frames)
    rows.about["workload"] = {"device_memory": "25%"}
    seconds = {"resident": 1, "layer-wise": 4, "on_demand": 5, "lru": 3, "smoe": 2}
    for length in (8, 16):
        found = {name: [(s * length, 1e6, [[7]])] * 2 for name, s in seconds.items()}
        if length == 16:
            found["lru"][1] = (*found["lru"][1][:2], [[8]])
        ttft.tell(rows, length, found)
    result = result_of(ttft.STUDY, rows)
    changes = {row["tokens"]: row["change"] for row in result["numbers"]["changes"]}
    assert changes == {8: -0.5, 16: -0.5}
    assert row_of(result, "waits", policy="lru", tokens=8)["ttft_s"] == 24
    assert list(result["checks"].values()) == [False]
    page, figures = page_of(ttft.STUDY, result)
    assert "8 tokens -50%, 16 tokens -50%" in page
    figures.draw(tmp_path)
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_ttft_prompt_as_long_as_the_context_is_refused(monkeypatch):
    config = types.SimpleNamespace(max_positions=16)

    class Bench:
        def __init__(self, checkpoint):
            self.config = config

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(ttft, "Bench", Bench)
    with pytest.raises(ValueError, match="16 tokens leaves no room in the model's"):
        ttft.measure(ttft.TtftSettings(lengths=(8, 16)), Rows(ttft.STUDY.frames))


def test_smoe_with_a_of_zero_is_exact_without_the_host():
    steps = fig14.smoe_steps(0.0)
    assert Case("", "25%", 1, steps["+Pre"]).is_exact
    assert not Case("", "25%", 1, steps["+BA"]).is_exact


def test_fig11_holds_smoe_against_the_best_of_each_workload():
    groups, timed = {}, {}
    times = {"A": (8, 9), "B": (10, 6), systems.OURS: (4, 4), systems.SMOE: (2, 3)}
    for name in times:
        case = Case(name, "25%", 1, OffloadOptions(assist="all"))
        slow = dataclasses.replace(case, policy=f"{name}, slow")
        groups[name, 1.0, 1] = [slow, case]
    ready = Ready([], [], 1e-3, LINK, POOL)
    for work in (0, 1):
        found = {}
        for group, tpot in zip(groups.values(), times.values(), strict=True):
            for case, factor in zip(group, (3e-3, 1e-3), strict=True):
                # The first round only chooses: it is ten times as slow here.
                tpot_s = [10 * factor * tpot[work], factor * tpot[work]]
                one = Timed(case, tpot_s, [0.5] * 2, [1.0] * 2, [True] * 2)
                found[case.key] = dataclasses.replace(one, fidelity=FIDELITY)
        timed[str(work)] = Timing(found, {1: [2e-3] * 2}, ready, {ON_TIME: True})
    rows = Rows(fig11.STUDY.frames)
    link = {"emulated": True, "expert_load_in_layers_of_compute": 30.0}
    link |= {"latency_s": 50e-6, "layer_compute_s": 1e-3}
    sizes = {"rounds": 2, "fidelity_rows": 8, "new_tokens": 24}
    rows.about["workload"] = {"a": 0.2, "link": link, "workloads": [0, 1]} | sizes
    fig11.tell(rows, timed, groups)
    result = result_of(fig11.STUDY, rows)
    other, lossless = result["numbers"]["changes"]
    assert other["change"] == pytest.approx((2 / 8 + 3 / 6) / 2 - 1)
    assert lossless["change"] == pytest.approx((2 / 4 + 3 / 4) / 2 - 1)
    page, _ = page_of(fig11.STUDY, result)
    assert "paper's S3 -34%, -48%" in page and "over 2 workloads" in page
    assert "| other, 1, batch 1 | -0.625 ± 0.12 | A, B |" in page
    assert "| lossless, 1, batch 1 | -0.375 ± 0.12 | ours, lossless |" in page
    assert row_of(result, "systems", workload="1", system="B")["tpot_ms"] == 6


def test_fig11_s_interval_is_over_workloads_where_a_round_is_alone():
    ratio_WR = np.array([[0.5], [0.7]])
    one = fig11.change_of(ratio_WR)
    assert one[:4] == pytest.approx((-0.4, 2, -0.5, -0.3))
    assert fig11.change_of(np.full((2, 1), 0.5))[:4] == (-0.5, 2, -0.5, -0.5)
    with started(1):  # where starts are what an interval is over
        assert fig11.change_of(ratio_WR)[:4] == pytest.approx((-0.4, 1, -0.4, -0.4))
    rounds = fig11.change_of(np.array([[0.5, 0.6], [0.7, 0.8]]))
    assert rounds[:4] == pytest.approx((-0.35, 2, -0.4, -0.3))
    assert rounds.kind != one.kind


def test_the_machines_own_link_has_no_rate_and_no_emulated_host():
    own = TransferLink()
    options = linked(OffloadOptions(), "25%", own)
    assert options == OffloadOptions(device_memory="25%")
    case = Case("", "25%", 1, OffloadOptions(assist="all"), host_loads=0.5)
    with pytest.raises(ConfigError, match="host_loads is 0.5 and the link is the mach"):
        on_link(case, own, 1000)
    told = describe_link(own, 2e-3, TimedSettings(link_factor=None), load_s=1e-3)
    assert not told["emulated"] and told["expert_load_in_layers_of_compute"] == 0.5
    assert systems.hosts_of(systems.Fig11Settings(link_factor=None)) == (None,)
    with pytest.raises(ConfigError, match="link_factor"):
        TimedSettings(link_factor=0)


def test_an_experts_time_on_an_emulated_host_follows_its_load():
    case = Case("", "25%", 1, OffloadOptions(assist="all"), host_loads=0.5)
    options = on_link(case, LINK, 1000)
    assert options.assist_expert_s == pytest.approx(0.5 * (1e-3 + 1e-4))
    assert on_link(dataclasses.replace(case, host_loads=None), LINK, 1000) == (
        dataclasses.replace(options, assist_expert_s=None)
    )

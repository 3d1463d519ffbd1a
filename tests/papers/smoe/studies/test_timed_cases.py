"""Findings and pictures of the timed studies, from numbers made by hand."""

import dataclasses
import itertools
import types

import numpy as np
import pytest

from moe_edge.bench.cases import Case, Ready, count_history, on_link
from moe_edge.bench.prompts import PromptPool
from moe_edge.bench.rounds import ON_TIME
from moe_edge.bench.timed_cases import Timed, Timing
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.evaluate.agreement import Agreement
from moe_edge.metrics.schema import METRIC_KEYS
from moe_edge.offload.link import EmulatedLink
from moe_edge.papers.smoe.studies import fig11, fig11_entry, fig12, fig14, ttft
from moe_edge.papers.smoe.studies.score_classes import Brought

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


def value_of(rows, policy, name):
    (row,) = [r for r in rows if (r["policy"], r["name"]) == (policy, name)]
    return row["value"]


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


def test_fig14_findings_compare_each_step_with_the_one_before(tmp_path):
    seen = Brought(low=0.5, top_absent=0.1, low_absent=0.3, low_of_absent=0.75)
    watched = {key: seen for key in ablation().timed}
    found = fig14.findings({}, ablation(), watched, SETTINGS)
    rows = found.metrics
    name = "TPOT change from the step before, batch 1"
    assert value_of(rows, "+CE", name) == pytest.approx(-0.1)
    assert value_of(rows, "+BA", name) == pytest.approx(-0.5)
    assert value_of(rows, "+CR", name.replace("TPOT", "cache ratio")) == (
        pytest.approx(0.6)
    )
    assert value_of(rows, "base", "TPOT, 25%, batch 1") == pytest.approx(20)
    assert value_of(rows, "base", "moved a step, 50%, batch 1") == pytest.approx(2)
    assert value_of(rows, "+CR", "teacher-forced agreement, 25%, batch 1") == 0.9
    assert value_of(rows, "resident", "TPOT, 100%, batch 1") == pytest.approx(3)
    assert not any("agreement" in r["name"] for r in rows if r["policy"] == "+CE")
    assert all(tuple(row) == METRIC_KEYS for row in rows)
    assert value_of(rows, "+BA", "host computes a step, 50%, batch 1") == 2
    assert value_of(rows, "+BA", "low-score choices absent, 25%, batch 1") == 0.3
    assert "low-score loading 60% (42%), top-score loading 20% (29%)" in (
        " ".join(found.details)
    )
    assert any("+Pre 4.0 of 6.0" in line for line in found.details)
    assert any("host 2.0 ms a step, link 4.0" in line for line in found.details)
    assert "+CE -10 % (-8)" in found.answer and len(found.answer.split()) <= 40
    assert all(found.checks.values())
    assert found.ours["+CE"] == pytest.approx((-0.1, 0.25))
    assert found.workload["budgets"] == ("25%", "50%")
    assert not {"checkpoint", "sources", "link_factor"} & set(found.workload)
    found.plot(tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_fig14_says_where_a_host_that_computes_beats_the_whole_of_smoe():
    timing = ablation()
    assert "every round of 0 of 2 settings" in fig14.told_of_cpu(timing)
    timing[fig14.ON_CPU, "50%", 1].tpot_s[:] = [2e-3, 2e-3]
    assert "every round of 1 of 2 settings" in fig14.told_of_cpu(timing)
    timing[fig14.ON_CPU, "50%", 1].tpot_s[1] = 4e-3
    assert "every round of 0 of 2 settings" in fig14.told_of_cpu(timing)


def test_timing_checks_name_a_case_with_other_tokens():
    timing = ablation()
    timing["+CR", "25%", 1].is_same[0] = False  # lossy: it may
    assert all(timing.checks().values())
    timing["+CE", "25%", 1].is_same[0] = False
    assert list(timing.checks().values()) == [False, True]
    late = dataclasses.replace(timing, on_time={ON_TIME: False})
    assert list(late.checks().values()) == [False, False]


def test_fig12_findings_hold_the_better_smoe_against_the_best_baseline(tmp_path):
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
    found = fig12.findings({}, timing, SETTINGS)
    name = "cache ratio over the best baseline's, 25%, batch 1"
    assert value_of(found.metrics, "SMoE, one pool", name) == pytest.approx(1.8)
    line = "25%, batch 1: 0.90 (SMoE, one pool) against 0.50 (LFU, equal slots)."
    assert line in found.details and found.summary["no_difference"] == []
    assert "+80 to +80 %" in found.answer
    found.plot(tmp_path / "p.png")


def test_fig12_calls_a_difference_within_the_rounds_none():
    config = types.SimpleNamespace(
        moe=types.SimpleNamespace(top_k=2), moe_layers=(0, 1)
    )
    named = fig12.policies(0.2, PROFILE, config)
    timing = make_timing(named, dict.fromkeys(named, 1e-2), dict.fromkeys(named, 0.5))
    for budget in SETTINGS.budgets:
        timing["SMoE, one pool", budget, 1].hit_ratio = [0.45, 0.6]
    found = fig12.findings({}, timing, SETTINGS)
    assert found.summary["no_difference"] == ["25%, batch 1", "50%, batch 1"]
    assert "beyond the rounds' spread: 25%, batch 1; 50%, batch 1" in found.details[-1]


def test_count_history_counts_tokens_and_drops_padding():
    history = [{1: np.array([[0, 2], [2, 3]])}, {1: np.array([[0, 3]])}]
    counts = count_history(history, num_layers=2, num_experts=3)
    assert counts.tolist() == [[0, 0, 0], [2, 0, 2]]


def test_ttft_findings_compare_with_layerwise(tmp_path):
    settings = ttft.TtftSettings(lengths=(8, 16), rounds=2)
    names = ("resident", "layer-wise", "on_demand", "lru", "smoe")
    found = {}
    for length in settings.lengths:
        for place, name in enumerate(names):
            seconds = (1.0, 4.0, 5.0, 3.0, 2.0)[place] * length
            found[name, length] = ttft.Waited([seconds] * 2, [1e6] * 2, [[[7]]] * 2)
    found["lru", 16] = found["lru", 16]._replace(tokens=[[[7]], [[8]]])
    result = ttft.findings({}, found, {}, settings)
    assert result.summary == {"ttft_change": {8: -0.5, 16: -0.5}}
    assert value_of(result.metrics, "lru", "TTFT, 8 prompt tokens") == 24
    assert list(result.checks.values()) == [False]
    result.plot(tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000


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
        ttft.run(ttft.TtftSettings(lengths=(8, 16)))


def test_smoe_with_a_of_zero_is_exact_without_the_host():
    steps = fig14.smoe_steps(0.0)
    assert Case("", "25%", 1, steps["+Pre"]).is_exact
    assert not Case("", "25%", 1, steps["+BA"]).is_exact


def test_fig11_holds_smoe_against_the_best_of_each_workload():
    settings = fig11.Fig11Settings(batches=(1,), host_loads=(1.0,), rounds=2)
    groups, timed = {}, {}
    times = {"A": (8, 9), "B": (10, 6), fig11.OURS: (4, 4), fig11.SMOE: (2, 3)}
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
    entry = fig11_entry.findings({}, timed, groups, ready, settings)
    systems, lossless = entry.ours["host 1 loads, batch 1"]
    assert systems == pytest.approx((2 / 8 + 3 / 6) / 2 - 1)
    assert lossless == pytest.approx((2 / 4 + 3 / 4) / 2 - 1)
    line = "-62 % against A, B; -38 % against ours, lossless."
    assert any(line in detail for detail in entry.details)
    assert value_of(entry.metrics, "B", "TPOT, 1, host 1 loads, batch 1") == 6


def test_an_experts_time_on_an_emulated_host_follows_its_load():
    case = Case("", "25%", 1, OffloadOptions(assist="all"), host_loads=0.5)
    options = on_link(case, LINK, 1000)
    assert options.assist_expert_s == pytest.approx(0.5 * (1e-3 + 1e-4))
    assert on_link(dataclasses.replace(case, host_loads=None), LINK, 1000) == (
        dataclasses.replace(options, assist_expert_s=None)
    )

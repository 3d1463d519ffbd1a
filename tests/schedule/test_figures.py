"""Figures of serving, by hand."""

import pytest

from moe_edge.schedule.figures import summarise
from moe_edge.schedule.request import Request


def served(arrival_s, *times, floor=8, k=8, outcome="finished"):
    one = Request(arrival_s=arrival_s, floor=floor)
    one.k, one.state = k, outcome
    for time_s in times:
        one.add(time_s)
    return one


def test_figures_of_a_run():
    runs = [
        served(1.0, 1.4, 1.5, 1.6),
        served(1.0, 2.0, k=16),
        served(2.0, 2.1, 2.5, 2.9, 3.0, k=6),
        served(2.0, outcome="refused"),
        served(3.0, 3.2, outcome="cancelled"),
    ]
    found = summarise(runs, slo_ttft_s=0.5, slo_tpot_s=0.2)
    assert found["requests"] == 5
    assert found["outcomes"] == {"cancelled": 1, "finished": 3, "refused": 1}
    assert found["throughput_req_s"] == pytest.approx(3 / 2.2)
    assert found["output_tokens_per_s"] == pytest.approx(9 / 2.2)
    assert found["ttft_ms"]["mean"] == pytest.approx(500)
    assert found["tpot_ms"]["p50"] == pytest.approx(200)  # 100 and 300
    assert found["e2e_ms"]["p99"] == pytest.approx(1000)
    assert found["slo_attainment"] == 0.2  # the first one: others wait or are slow
    assert found["floor_violations"] == 1
    assert found["mean_k"] == pytest.approx((3 * 8 + 16 + 4 * 6 + 8) / 9)


def test_one_token_has_no_time_between_tokens():
    assert served(0.0, 0.1).tpot_s is None
    assert summarise([served(0.0, 0.1)])["slo_attainment"] == 1.0


@pytest.mark.parametrize("runs", [[], [served(0.0, outcome="expired")]])
def test_runs_without_a_token_have_no_figures(runs):
    found = summarise(runs)
    assert found["throughput_req_s"] == found["output_tokens_per_s"] == 0.0
    assert found["ttft_ms"] == dict.fromkeys(("mean", "p50", "p95", "p99"))
    assert found["mean_k"] is None and found["floor_violations"] == 0

"""The last line and the table of a load."""

import pytest

from moe_edge.loadtest.results import HEAD, Results
from moe_edge.schedule.request import Request


def served():
    one, other = (
        Request(i, arrival_s=at, floor=k)
        for i, (at, k) in enumerate([(0.5, 8), (1.0, 16)])
    )
    one.admitted_s, one.state, other.state = 0.6, "finished", "refused"
    for one.k, time_s in ((8, 0.75), (12, 1.0)):
        one.add(time_s)
    return [one, other]


def test_summary_has_the_keys_of_the_last_line():
    late_s = [0.001 * i for i in range(101)]
    summary = Results(served=served(), late_s=late_s, is_equal=True).summary(0.3, 0.2)
    assert list(summary) == [
        *("requests", "outcomes", "throughput_req_s", "output_tokens_per_s"),
        *("ttft_ms", "tpot_ms", "e2e_ms", "slo_attainment", "floor_violations"),
        *("mean_k", "late_ms_p99", "decisions_equal"),
    ]
    assert summary["late_ms_p99"] == pytest.approx(99)
    assert summary["slo_attainment"] == 0  # a token took 250 ms
    assert Results(served=served()).summary(0.3, 0.3)["slo_attainment"] == 0.5
    assert Results(served=served()).summary(1, 1)["late_ms_p99"] is None
    assert Results(served=[], late_s=[]).summary(1, 1)["late_ms_p99"] == 0


def test_table_has_a_line_a_request():
    assert Results(served=served()).csv().splitlines() == [
        HEAD,
        "0,0.5,8,finished,2,0.6,0.75,1.0,10.0",
        "1,1.0,16,refused,0,,,,",
    ]

import dataclasses

import pytest

from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.planner.candidates import Candidate
from moe_edge.planner.choose import judge, loses_by, ranked
from moe_edge.planner.estimate import Estimate, exactly
from moe_edge.planner.options import PlanOptions


def estimated(tpot_s, ppl=1.0, device=100, host=50):
    return Estimate(
        tpot_s=exactly(tpot_s),
        ttft_s=exactly(10 * tpot_s),
        tokens_per_s=exactly(1 / tpot_s),
        device_bytes=exactly(device),
        host_bytes=exactly(host),
        mapped_bytes=exactly(0),
        hit_ratio=exactly(0.5),
        ppl_ratio=exactly(ppl),
        agreement=exactly(0.9),
    )


def judged(asked, *times, **more):
    found = []
    for tpot_s, options in times:
        candidate = Candidate(OffloadOptions(**options))
        found.append(judge(candidate, estimated(tpot_s, **more), asked))
    return found


def test_of_those_within_the_margin_the_one_that_changes_least_is_chosen():
    asked = PlanOptions(margin="5%")
    times = (0.010, {"eviction": "lfu"}), (0.0104, {}), (0.02, {"eviction": "hybrimoe"})
    order = ranked(judged(asked, *times), asked)
    assert [one.candidate.options.eviction for one in order] == [
        "lru",
        "lfu",
        "hybrimoe",
    ]
    asked = dataclasses.replace(asked, margin="1%")
    assert ranked(judged(asked, *times), asked)[0].candidate.options.eviction == "lfu"


def test_target_that_nothing_meets_leaves_the_nearest_first():
    asked = PlanOptions(tpot_ms=5.0)
    order = ranked(judged(asked, (0.02, {}), (0.01, {"eviction": "lfu"})), asked)
    assert order[0].missed == {"tpot_s": pytest.approx(1.0)}
    assert not order[0].feasible


def test_host_memory_agreement_and_ratio_are_targets():
    asked = PlanOptions(host_memory="25B", min_agreement=0.95, max_ppl_ratio=1.01)
    (one,) = judged(asked, (0.01, {}), ppl=1.02)
    assert one.missed == {
        "ppl_ratio": pytest.approx(1.02 / 1.01 - 1),
        "host_bytes": pytest.approx(1.0),
        "agreement": pytest.approx(1 - 0.9 / 0.95),
    }


def test_what_is_not_known_meets_no_target():
    asked = PlanOptions()
    found = dataclasses.replace(estimated(0.01), ppl_ratio=None)
    assert judge(Candidate(OffloadOptions()), found, asked).missed == {
        "ppl_ratio": float("inf")
    }


def test_objective_memory_takes_the_least_that_meets_the_target():
    asked = PlanOptions(objective="memory", tpot_ms=15.0)
    candidate = Candidate(OffloadOptions())
    small, large = (
        judge(candidate, estimated(tpot_s, device=size), asked)
        for tpot_s, size in ((0.014, 10), (0.01, 100))
    )
    slow = judge(candidate, estimated(0.02, device=1), asked)
    assert ranked([slow, large, small], asked) == [small, large, slow]
    assert loses_by(large, small) == {"device_bytes": pytest.approx(9.0)}
    assert loses_by(small, large) == {
        "tpot_s": pytest.approx(0.4),
        "ttft_s": pytest.approx(0.4),
    }

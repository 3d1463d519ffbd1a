"""What a run leaves: events of tokens, calls and losses, by hand."""

import types

import numpy as np
import pytest

from moe_edge.cluster.prism.outcome import events_of, told
from moe_edge.cluster.scheduler.requests import ClusterRequest, Failure

BEGUN_S, OFFSET_S = 100.0, 7.0  # the server's clock is ahead


def finished_run():
    """One request at server 1, two tokens, one call to server 0; server 2 is lost."""
    one = ClusterRequest(4, "a", 1, "words", 0.5, [1, 2], 2)
    one.arrived_s, one.times_s, one.tokens, one.at = 100.5, [101.0, 101.25], [3, 4], 0
    one.made_by = [1, 0]  # server 1 is lost in between
    call = [107.75, 0.125, 0, 5, 4, 8, 1, 8, 999]
    none = np.zeros((0, 9))
    arrays = {"calls": np.array([call]), "brought": none[:, :5]}
    return types.SimpleNamespace(
        asked=[one],
        notes={1: ({}, arrays), 0: ({}, {"calls": none, "brought": none[:, :5]})},
        offsets_s={0: 0.0, 1: OFFSET_S},
        begun_s=BEGUN_S,
        failures=[Failure(2, "dead", 3.0)],
    )


def test_events_have_every_token_call_and_loss():
    events = {kind: [] for kind in ("compute", "call", "fail")}
    for event in events_of(finished_run()):
        events[event.kind].append(event)
    tokens = [(e.t_s, e.dur_s, e.request, e.step, e.server) for e in events["compute"]]
    assert tokens == [(0.5, 0.5, 4, 0, 1), (1.0, 0.25, 4, 1, 0)]
    (call,) = events["call"]
    assert (call.t_s, call.dur_s) == pytest.approx((0.75, 0.125))
    assert (call.server, call.layer, call.request, call.bytes) == (0, 5, 4, 999)
    (fail,) = events["fail"]
    assert (fail.t_s, fail.server) == (3.0, 2)


def test_a_request_that_is_served_again_knows_nothing_of_before():
    (one,) = finished_run().asked
    one.done, one.passed_on, one.error = True, True, "x"
    again = one.fresh()
    assert vars(again) == vars(ClusterRequest(4, "a", 1, "words", 0.5, [1, 2], 2))
    assert again.made_by is not one.made_by


def test_a_row_is_told_in_one_sentence():
    row = {"mean_latency_s": 0.09374581, "local_ratio": 0.92261}
    assert told("optimal", row) == (
        "optimal: 0.094 s a request, 92.3 % of the calls to experts stayed on their "
        "server"
    )
    none = {"mean_latency_s": None, "local_ratio": None}
    assert told("a", none) == "a: no request was finished"
    assert told("a", row | {"local_ratio": None}) == "a: 0.094 s a request"

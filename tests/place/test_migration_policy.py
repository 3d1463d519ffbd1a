"""Counts in, a judged candidate out."""

import dataclasses

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.place.migration_policy import Ledger, MigrationPolicy
from moe_edge.place.placer import Placer
from moe_edge.place.plan import Placement
from tests.place.support import cost_model

# One layer, two blocks, two servers: each holds what the other one asks for.
WRONG = Placement(np.array([[[0, -1]], [[-1, 0]]]))
RIGHT = Placement(np.array([[[-1, 0]], [[0, -1]]]))
COSTS = cost_model(gpus=((1.0,), (1.0,)))
SLOTS = [np.array([1]), np.array([1])]
CALL_S = np.array([[0.0, 2.0], [4.0, 0.0]])


@dataclasses.dataclass(frozen=True)
class Told(Placer):
    """Gives one placement and keeps what it was told."""

    name = "told"
    SOURCE = "test"
    heard: list

    def assign(self, problem):
        self.heard.append(problem)
        return RIGHT


def policy(heard=None, **options):
    options = {"period_s": 10.0, "hysteresis": 0.0} | options
    return MigrationPolicy(placer=Told([] if heard is None else heard), **options)


def counted(seen_s=10.0):
    """Server 0 asked in 3 steps for block 1 (8 pairs), server 1 in one for block 0."""
    ledger = Ledger((2, 1, 2))
    for pairs in (2, 2, 4):
        ledger.count(0, np.array([1]), np.array([pairs]))
    ledger.add(1, np.array([1, 0]), np.array([1, 0]))
    ledger.seen_s = seen_s
    return ledger


def test_measured_seconds_times_calls_are_held_against_moving():
    heard = []
    candidate, decision, calls_NLE = policy(heard).propose(
        counted(), WRONG, SLOTS, COSTS, CALL_S
    )
    assert calls_NLE.tolist() == [[[0, 3]], [[1, 0]]]
    assert (decision.current_s, decision.candidate_s) == (3 * 2.0 + 4.0, 0.0)
    assert decision.migration_s == pytest.approx(2 * 192e-9) and decision.adopt
    assert (candidate.gpu_NLE == RIGHT.gpu_NLE).all()
    (problem,) = heard  # one pair of every block on top; shares of a layer's pairs
    expected = np.array([[[1, 9]], [[2, 1]]]) / 13
    np.testing.assert_allclose(problem.frequency_NLE, expected)
    assert problem.current is WRONG


def test_calls_are_those_of_a_period_to_come():
    decision = policy().propose(counted(40.0), WRONG, SLOTS, COSTS, CALL_S).decision
    assert decision.current_s == 10.0 / 4


def test_without_measured_seconds_calls_cost_what_the_model_says():
    decision = policy().propose(counted(), WRONG, SLOTS, COSTS).decision
    # 9 pairs in 4 calls: 2.25 hidden states of 16 bytes there and back, 1 ms each.
    assert decision.current_s == pytest.approx(4 * 2 * (1e-3 + 2.25 * 16e-6), rel=1e-4)


@pytest.mark.parametrize("hysteresis, adopt", [(0.4, True), (0.6, False)])
def test_hysteresis_is_a_share_of_the_cost(hysteresis, adopt):
    ledger = counted()
    ledger.add(1, np.array([0, 1]), np.array([0, 1.25]))  # remote only after moving
    rule = policy(hysteresis=hysteresis)
    decision = rule.propose(ledger, WRONG, SLOTS, COSTS, CALL_S).decision
    assert (decision.current_s, decision.candidate_s) == (10.0, 5.0)
    assert decision.adopt == adopt


def test_a_ledger_fades_all_alike():
    ledger = counted()
    assert not ledger.empty and Ledger((2, 1, 2)).empty
    ledger.fade(0.5)
    assert ledger.seen_s == 5.0
    assert ledger.pairs_NX.tolist() == [[0, 4], [0.5, 0]]
    assert ledger.calls_NX.tolist() == [[0, 1.5], [0.5, 0]]


def test_policies_that_mean_nothing_are_refused():
    refused = {
        r"keep must lie in \[0, 1\], got 1.5": {"keep": 1.5},
        "period_s must be positive, got 0": {"period_s": 0},
        "period_s must be 0 or more and finite, got -3": {"period_s": -3},
        "period_s must be 0 or more and finite, got inf": {"period_s": float("inf")},
        "unknown source of blocks 'disk'": {"source": "disk"},
        "hysteresis is -1, expected 0 or more": {"hysteresis": -1},
        "chunk_bytes must be a positive whole number": {"chunk_bytes": 0.5},
    }
    for message, options in refused.items():
        with pytest.raises(ConfigError, match=message):
            policy(**options)

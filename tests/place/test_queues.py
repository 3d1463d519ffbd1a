"""Delays on links and waits before servers, by hand."""

import numpy as np
import pytest

from moe_edge.place.latency_model import link_delays, sojourn

BUSY = 1e-3 * np.array([[0.0, 10.0, 0.0], [20.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
RATE = np.array([0.1, 0.2, 0.3])
SERVED = np.array([1.0, 2.0, 1.0])


def test_link_delays_one_link_by_hand():
    late_NM = link_delays(BUSY, BUSY, RATE, SERVED, one_link=True)
    # A request of server 0 takes 10 ms of link 0, and of link 1 for answers: 1 % of its
    # second. One of server 1: 20 ms each, 1 % of its two seconds.
    zero, one = 0.1 * 10e-3 / 0.99, 0.2 * 20e-3 / 0.99
    expected = [
        [0, one + one, one + 0],  # answers to 1 on link 0; sends of 1; 2 is silent
        [zero + zero, 0, zero + 0],
        [zero + one, one + zero, 0],
    ]
    np.testing.assert_allclose(late_NM, expected)


def test_link_delays_link_a_pair_leaves_others_out():
    late_NM = link_delays(BUSY, BUSY, RATE, SERVED, one_link=False)
    zero, one = 0.1 * 10e-3 / 0.99, 0.2 * 20e-3 / 0.99
    np.testing.assert_allclose(late_NM, [[0, 2 * one, 0], [2 * zero, 0, 0], [0, 0, 0]])


def test_link_delays_a_hog_slows_more_than_its_share_of_time():
    hog = link_delays(90 * BUSY, 90 * BUSY, RATE, SERVED, True)
    assert hog[2, 1] > 90 * link_delays(BUSY, BUSY, RATE, SERVED, True)[2, 1]


def test_sojourn_is_the_mean_of_an_mg1_queue():
    total_N, slope_N = sojourn(np.array([1.0, 1e-3]), np.array([0.5, 0.5]))
    assert total_N[0] == pytest.approx(1 + 0.5 * 1.5 / 2 / 0.5)
    assert slope_N[0] == pytest.approx(1 + 0.375 * 1.5 / 0.25, rel=1e-3)
    assert total_N[1] == pytest.approx(1e-3, rel=1e-2)


def test_sojourn_rises_beyond_full_use():
    served_N = np.linspace(0.1, 5, 60)
    total_N, slope_N = sojourn(served_N, np.ones(60))
    assert np.isfinite(total_N).all()
    assert (np.diff(total_N) > 0).all()
    assert (slope_N > 1).all()

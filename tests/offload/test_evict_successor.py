import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.offload.evict_base import CacheSpec, get_eviction
from moe_edge.offload.slot_cache import SlotCache

SPEC = CacheSpec(2, 4, 1, (0, 0, 0))


def touched(policy, *ids, layer=0, state=None):
    state = policy.init(SPEC) if state is None else state
    for step, row in enumerate(ids):
        state = policy.touch(state, layer, np.array(row, np.int32), None, step)
    return state


def test_worth_by_hand():
    """Experts 0, 1, 0 of layer 0; discount and half-life of one half."""
    policy = get_eviction("successor", discount=0.5, half_life=1.0, prior=1.0)
    state = touched(policy, [[0]], [[1]], [[0]])
    # After 0 came 1, then (half) 0; after 1 came 0. The last step is learnt later.
    after_EE = np.array([[0.5, 1.0, 0, 0], [1.0, 0, 0, 0], [0] * 4, [0] * 4])
    np.testing.assert_allclose(state["after_LEE"][0, 0, :2], [0, 1.0], rtol=1e-6)
    # Chosen now: 0, which was seen once before with a successor, beside one prior use.
    mean_E = np.array([2, 1, 0, 0]) / 3 / (1 - 0.5)
    recent_E = np.array([0.5 + 0.125, 0.25, 0, 0])
    worth_E = recent_E + (after_EE[0] + mean_E) / 2
    np.testing.assert_allclose(state["worth_B"][:4], worth_E, rtol=1e-6)
    assert not state["worth_B"][4:].any(), "the other layer has seen nothing"
    state = policy.touch(state, 0, np.array([[2]], np.int32), None, 3)
    np.testing.assert_allclose(state["after_LEE"][0], after_EE, rtol=1e-6)


def test_a_step_that_comes_in_parts_is_one_step():
    """A layer that exceeds its slots is looked up in waves, other pairs masked."""
    policy = get_eviction("successor")
    ids = [[0, 1], [2, 3], [1, 2]]
    whole, parts = policy.init(SPEC), policy.init(SPEC)
    for step in range(4):
        rows = np.roll(np.array(ids, np.int32), step, axis=0)
        whole = policy.touch(whole, 0, rows, None, step)
        for wave in ((0, 2), (1, 3)):
            parts = policy.touch(
                parts, 0, np.where(np.isin(rows, wave), rows, 4), None, step
            )
        np.testing.assert_allclose(parts["worth_B"], whole["worth_B"], rtol=1e-5)
    np.testing.assert_allclose(parts["after_LEE"], whole["after_LEE"], rtol=1e-5)
    assert parts["learnt_L"].tolist() == [3, 0]


@pytest.mark.parametrize("name, expected", [("lru", 0), ("successor", 8)])
def test_what_comes_in_turns_is_kept_as_if_the_future_were_known(name, expected):
    """Four experts in turns in three slots: Belady's misses are one in three."""
    options = {"half_life": 1.0} if name == "successor" else {}
    cache, hits = SlotCache(SPEC, get_eviction(name, **options)), []
    for step, expert in enumerate((0, 1, 2, 3) * 6):
        hit, misses = cache.look_up(0, np.array([[expert]], np.int32), None, step)
        for each in misses:
            cache.admit(0, each)
        hits.append(len(hit))
    assert sum(hits[-12:]) == expected


def test_tokens_of_a_step_count_as_their_mean_and_padding_for_nothing():
    policy = get_eviction("successor")
    one = touched(policy, [[0]], [[1]])
    several = touched(policy, [[0], [0], [4]], [[1], [1], [1]])
    np.testing.assert_allclose(several["worth_B"], one["worth_B"], rtol=1e-6)
    apart = touched(policy, [[0]], [[1], [2]])
    assert apart["worth_B"][1] == apart["worth_B"][2] > apart["worth_B"][3]
    assert apart["used_LE"].sum() == 1 and apart["count_LX"].sum() == 2


@pytest.mark.parametrize(
    "options, message",
    [
        ({"discount": 1.0}, r"discount must lie in \[0, 1\), got 1.0"),
        ({"half_life": 0.0}, "half_life"),
        ({"prior": -1.0}, "prior"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        get_eviction("successor", **options)

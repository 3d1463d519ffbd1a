import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.offload.evict_base import CacheSpec, get_eviction
from moe_edge.offload.slot_cache import SlotCache

SPEC = CacheSpec(1, 6, 2, (0, 0, 0))


def run(policy, lookups):
    """Misses of each lookup and what the slots hold at the end."""
    cache, missed = SlotCache(SPEC, policy), []
    for step, ids in enumerate(lookups):
        misses = cache.look_up(0, np.array([ids], np.int32), None, step).misses
        for expert in misses:
            cache.admit(0, expert)
        missed.append(misses)
    return missed, cache.state["key_S"].tolist()


def test_lfu_counts_every_token_of_a_lookup():
    policy = get_eviction("lfu")
    state = policy.init(SPEC)
    ids_TK = np.array([[0, 1], [0, 2], [0, 6]], np.int32)
    state = policy.touch(state, 0, ids_TK, None, 0)
    assert state["count_B"][:6].tolist() == [3, 1, 1, 0, 0, 0]


def test_static_prompt_keeps_the_prompt_s_blocks_against_later_use():
    """Prompt (steps 0-2) uses 0 three times, 1 twice, 2 once."""
    lookups = [[0, 1], [0, 1], [0, 2], [3, 6], [4, 6], [3, 6], [2, 6]]
    missed, key_S = run(get_eviction("static_prompt", prompt_steps=3), lookups)
    # 3 takes 2's slot; from then on that one slot changes hands, 0 and 1 stay though
    # they are never used again.
    assert missed == [[0, 1], [], [2], [3], [4], [3], [2]]
    assert key_S == [0, 1, 2]
    missed, key_S = run(get_eviction("lfu"), lookups)
    assert missed == [[0, 1], [], [2], [3], [4], [3], [2]]
    # A whole step outside the kept blocks takes the least used of them.
    missed, key_S = run(
        get_eviction("static_prompt", prompt_steps=3), [*lookups[:3], [3, 4], [0, 1]]
    )
    assert missed[3:] == [[3, 4], [1]]
    assert key_S[0] == 0


def test_static_oracle_gives_up_the_rarest_of_the_profile():
    profile = np.array([[9, 1, 5, 4, 3, 2]])
    lookups = [[1, 0], [2, 6], [3, 6], [4, 6], [1, 6]]
    missed, key_S = run(get_eviction("static_oracle", profile=profile), lookups)
    # 1 goes for 3, then 3 for 4, then 4 for 1; 0 and 2 stay.
    assert missed == [[1, 0], [2], [3], [4], [1]]
    assert key_S == [1, 0, 2]


def test_static_policies_reject_bad_options():
    with pytest.raises(ConfigError, match="static_oracle got no profile"):
        get_eviction("static_oracle")
    with pytest.raises(ConfigError, match=r"shape \(2, 6\), expected \(1, 6\)"):
        get_eviction("static_oracle", profile=np.zeros((2, 6))).init(SPEC)
    with pytest.raises(ConfigError, match="prompt_steps must be a positive.*got 0"):
        get_eviction("static_prompt", prompt_steps=0)

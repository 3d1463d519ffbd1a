"""Host memory below a pool."""

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.papers.coserve.memory.host_tier import HostTier

SIZES = [3, 4, 2, 9]


def test_experts_stay_until_others_need_the_room():
    tier = HostTier(7, SIZES)
    tier.keep([0, 1])
    assert 0 in tier and tier.used_bytes == 7
    tier.keep([0])  # once more: now 1 is the least recent
    tier.keep([2])
    assert 1 not in tier and 0 in tier and 2 in tier and tier.used_bytes == 5
    assert tier.take(0) and not tier.take(0) and tier.used_bytes == 2
    tier.keep([3])  # larger than the tier
    assert 3 not in tier and len(tier) == 1


def test_start_holds_the_most_probable_of_those_in_no_pool():
    tier = HostTier(6, SIZES)
    tier.fill([0.1, 0.2, 0.4, 0.3], resident=[2])
    assert 1 in tier and len(tier) == 1  # 3 is too large, 0 finds no room any more
    tier = HostTier(7, SIZES)
    tier.fill([0.1, 0.2, 0.4, 0.3], resident=[2])
    tier.keep([2])
    assert 0 not in tier and 1 in tier  # the least probable leaves first


def test_tier_without_bytes_is_refused():
    with pytest.raises(ConfigError, match="budget_bytes must be a positive whole numb"):
        HostTier(0, SIZES)

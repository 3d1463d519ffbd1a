"""The scheduler and real servers on loopback: tokens, migration, losses."""

import pytest

from tests.support.live_cluster import (
    SLOTS,
    LiveCluster,
    Wandering,
    assert_tokens_of_one_machine,
    random_held,
    requests,
)


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_any_placement_gives_the_tokens_of_one_machine(servers):
    with LiveCluster([SLOTS] * servers) as cluster:
        for seed in range(2):
            asked = requests((9, 16, 40, 1), 8, servers)
            run = cluster.run(random_held(servers, seed, copies=0.2), asked)
            assert_tokens_of_one_machine(run.asked)
            assert not run.failures and not run.keeper.table.changes


def test_migration_in_the_midst_of_generation_changes_no_token():
    tables = [random_held(3, seed) for seed in range(4)]
    with LiveCluster([SLOTS] * 3) as cluster:
        asked = requests((9, 16, 12), 48, 3)
        cluster.hold(asked[-1], {("to", "table"): 1})
        run = cluster.run(tables[0], asked, policy=Wandering(tables))
        assert_tokens_of_one_machine(run.asked)
        assert run.keeper.table.moved > 0

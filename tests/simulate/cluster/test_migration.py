import numpy as np
import pytest

from moe_edge.place.migration_policy import MigrationPolicy
from moe_edge.simulate.cluster.migration import Migration
from tests.support.tiny_cluster import (
    Fixed,
    asked,
    constant_pools,
    placed,
    run,
    tiny_costs,
)

POOLS = constant_pools(2, a=[[1]], b=[[0]])
WRONG = placed([[0, -1]], [[-1, 0]])  # server 0 asks for 1, server 1 for 0
RIGHT = [[[-1, 0]], [[0, -1]]]


def serve(requests, source="host", slots=1, **options):
    policy = MigrationPolicy(
        placer=Fixed(RIGHT), source=source, hysteresis=0.0, **options
    )
    costs = tiny_costs((1, 1), slots)
    return run(requests, WRONG, costs, POOLS, migration=policy)


def early(count):
    """So many requests of one token at server 0, a second apart."""
    return [(0, 2.0 * i, 1, 1, "a") for i in range(count)]


def test_blocks_land_over_host_links_and_calls_become_local():
    requests = asked(*early(4), (0, 8.5, 1, 1, "a"), (0, 20.0, 1, 1, "a"))
    loop, result = serve(requests, period_s=8.0)
    # Remote calls take .5 + .1875 + .25 + .1875 = 1.125. At 8 s four calls were seen,
    # worth .625 s each; two blocks at 1.125 s each cost 2.25 < 2.5. One lands at
    # 9.125 in spare memory, then block 1 of server 1 makes room for the other one.
    assert loop.finish_R.tolist() == [1.125, 3.125, 5.125, 7.125, 9.625, 20.75]
    first = loop.migration.migrations[0]
    assert (first.time_s, first.done_s) == (8.0, 10.25)
    assert (first.decision.moves, first.decision.current_s) == (2, 2.5)
    assert result.host_bytes_G.tolist() == [768, 768]
    assert loop.migration.placement.gpu_NLE.tolist() == RIGHT
    assert loop.table.gpu_NX.tolist() == [[-1, 0], [1, -1]]


def test_tokens_planned_ahead_learn_of_a_block_that_landed():
    requests = asked(*early(4), (0, 7.5, 1, 4, "a"), (0, 20.0, 1, 1, "a"))
    loop, _ = serve(requests, period_s=8.0)
    # Remote: 8.625 and, begun before the block landed at 9.125, 9.75. Then local.
    assert loop.migration.migrations[0].done_s == 10.25
    assert loop.finish_R.tolist()[4:] == [11.25, 20.75]


def test_too_few_calls_move_nothing():
    requests = asked(*early(3), (0, 8.5, 1, 1, "a"), (0, 20.0, 1, 1, "a"))
    loop, result = serve(requests, period_s=8.0)
    assert loop.finish_R.tolist() == [1.125, 3.125, 5.125, 9.625, 21.125]
    assert [m.decision.adopt for m in loop.migration.migrations] == [False, False]
    assert result.host_bytes_G.sum() == 0


def test_blocks_over_the_network_let_calls_between_their_chunks():
    # A block takes 6 + .0625 s on the link and 1.125 s on the host link: 14.375 s for
    # two, less than 24 calls lose. A chunk of 256 bytes occupies the link for 2 s:
    # chunks to server 0 begin at 28, 30, 32. The call of 28.5 goes out at 29 behind the
    # chunk to server 1 until 30: but the chunk event of 30 came later, so 30.125 and
    # + .0625 there.
    requests = asked((0, 0.0, 1, 24, "a"), (0, 28.5, 1, 1, "a"), (0, 60.0, 1, 1, "a"))
    loop, result = serve(requests, "network", period_s=28.0, chunk_bytes=256)
    # Computed 30.4375; the way back is held by the chunk that began at 30 until 32.
    assert loop.finish_R.tolist()[1:] == [32.1875, 60.75]
    assert result.bytes_NN["migrate"].tolist() == [[0, 768], [768, 0]]
    # To server 0 the chunks end at 30, 32 and, behind the result, 34.125; + .0625,
    # then two exchanged blocks, one after the other, over the host links.
    assert loop.migration.migrations[0].done_s == 34.1875 + 2 * 1.125


def test_blocks_over_the_network_must_be_worth_their_way():
    # 23 calls of .625 s are 14.375 s, exactly what two blocks take over the network;
    # over the host links they take 2.25 s.
    requests = asked((0, 0.0, 1, 23, "a"), (0, 60.0, 1, 1, "a"))
    for source, seconds in (("network", 14.375), ("host", 2.25)):
        loop, _ = serve(requests, source, period_s=28.0)
        first = loop.migration.migrations[0].decision
        assert (first.current_s, first.migration_s) == (14.375, seconds)
        assert first.adopt == (source == "host")


@pytest.mark.parametrize(
    "keep, calls", [(1.0, 7 / 16), (0.5, (1.5 + 4) / (4 + 8)), (0.0, 4 / 8)]
)
def test_second_decision_forgets_a_share_of_the_first_period(keep, calls):
    # Three calls in the first period, too few, then four; calls a second.
    later = [(0, 8.5 + 2.0 * i, 1, 1, "a") for i in range(4)]
    requests = asked(*early(3), *later, (0, 20.0, 1, 1, "a"))
    loop, _ = serve(requests, period_s=8.0, keep=keep)
    first, second = [m.decision for m in loop.migration.migrations[:2]]
    assert (first.current_s, first.adopt) == (1.875, False)
    assert second.current_s == pytest.approx(calls * 8 * 0.625)
    assert second.adopt == (keep < 1)


def test_periods_during_a_migration_forget_as_others_do(monkeypatch):
    # The first migration never ends.
    expected, judge = [], Migration._judge

    def watched(self, time_s, *_):
        judge(self, time_s)
        expected.append(self.propose()[2][0, 0, 1])

    monkeypatch.setattr(Migration, "_judge", watched)
    monkeypatch.setattr(
        Migration, "_begin", lambda self, *_: setattr(self, "_on_way", 1)
    )
    requests = [(0, 0.5 + 2.0 * i, 1, 1, "a") for i in range(16)]
    policy = MigrationPolicy(8.0, 0.5, placer=Fixed(RIGHT), hysteresis=0.0)
    loop, _ = run(asked(*requests), WRONG, tiny_costs((1, 1), 1), POOLS,
                  migration=policy)  # fmt: skip
    assert (
        len(loop.migration.migrations) == 1
        and loop.migration.migrations[0].decision.adopt
    )
    np.testing.assert_allclose(expected[:4], 4.0)


def test_use_is_a_share_of_the_time_until_the_last_job():
    _, result = serve(asked(*early(1)), period_s=300.0)
    assert result.end_s == 1.125
    assert result.gpu_use_G.tolist() == [0.5 / 1.125, 0.25 / 1.125]
    # Blocks that still come when nobody waits any more are jobs too.
    requests = asked(*early(4), (0, 7.25, 1, 1, "a"))
    loop, result = serve(requests, period_s=8.0)
    assert loop.finish_R[-1] == 8.375 and result.end_s == 10.125
    assert loop.links.host_busy == [1.0, 1.0]


def test_memory_is_freed_first_where_another_server_holds_the_block():
    before, after = [[[0, 0, -1]], [[0, -1, 0]]], [[[-1, 0, 0]], [[0, -1, 0]]]
    policy = MigrationPolicy(8.0, placer=Fixed(after), hysteresis=0.0)
    # Block 0 is dropped at 8: the second token of the request of 7.5 asks server 1.
    requests = asked(*early(4), (0, 7.5, 1, 2, "b"), (0, 20.0, 1, 1, "a"))
    costs = tiny_costs((1, 1), 2)
    pools = constant_pools(3, a=[[2]], b=[[0]])
    loop, result = run(requests, placed(*before), costs, pools, migration=policy)
    assert loop.migration.migrations[0].done_s == 9.125
    assert loop.finish_R.tolist()[3:] == [7.125, 9.375, 20.75]
    assert result.facts["peak_memory"] == 1.0
    # Two servers that exchange their only copies: one block in spare memory.
    _, result = serve(asked(*early(4), (0, 20.0, 1, 1, "a")), period_s=8.0)
    assert result.facts["peak_memory"] == 2.0

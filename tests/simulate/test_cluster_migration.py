import dataclasses

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.place.placer import Placer
from moe_edge.place.plan import Placement
from moe_edge.simulate.cluster_migration import MigratingLoop, MigrationPolicy
from tests.support.tiny_cluster import asked, constant_pools, placed, run, tiny_costs

POOLS = constant_pools(2, a=[[1]], b=[[0]])
WRONG = placed([[0, -1]], [[-1, 0]])  # server 0 asks for 1, server 1 for 0
RIGHT = [[[-1, 0]], [[0, -1]]]


@dataclasses.dataclass(frozen=True)
class Fixed(Placer):
    """Always the right placement."""

    name = "fixed"
    SOURCE = "test"

    def assign(self, problem):
        return Placement(np.array(RIGHT))


def serve(requests, source="host", slots=1, **options):
    policy = MigrationPolicy(Fixed(), source=source, hysteresis=0.0, **options)
    costs = tiny_costs((1, 1), slots)
    return run(requests, WRONG, costs, POOLS, MigratingLoop, policy=policy)


def early(count):
    """So many requests of one token at server 0, a second apart."""
    return [(0, 2.0 * i, 1, 1, "a") for i in range(count)]


def test_blocks_land_over_host_links_and_calls_become_local():
    requests = asked(*early(4), (0, 8.5, 1, 1, "a"), (0, 20.0, 1, 1, "a"))
    loop, result = serve(requests, period_s=8.0)
    # Remote calls take .5 + .1875 + .25 + .1875 = 1.125. At 8 s four calls were seen,
    # worth .625 s each; two blocks at 1.125 s each cost 2.25 < 2.5. Both land at 9.125.
    assert loop.finish_R.tolist() == [1.125, 3.125, 5.125, 7.125, 9.625, 20.75]
    first = loop.migrations[0]
    assert (first.time_s, first.done_s) == (8.0, 9.125)
    assert (first.decision.moves, first.decision.current_s) == (2, 2.5)
    assert result.host_bytes_G.tolist() == [768, 768]
    assert loop.placement.gpu_NLE.tolist() == RIGHT
    assert loop.table.gpu_NX.tolist() == [[-1, 0], [1, -1]]


def test_tokens_planned_ahead_learn_of_a_block_that_landed():
    requests = asked(*early(4), (0, 7.5, 1, 4, "a"), (0, 20.0, 1, 1, "a"))
    loop, _ = serve(requests, period_s=8.0)
    # Remote: 8.625 and, begun before the block landed at 9.125, 9.75. Then local.
    assert loop.migrations[0].done_s == 9.125
    assert loop.finish_R.tolist()[4:] == [11.25, 20.75]


def test_too_few_calls_move_nothing():
    requests = asked(*early(3), (0, 8.5, 1, 1, "a"), (0, 20.0, 1, 1, "a"))
    loop, result = serve(requests, period_s=8.0)
    assert loop.finish_R.tolist() == [1.125, 3.125, 5.125, 9.625, 21.125]
    assert [m.decision.adopt for m in loop.migrations] == [False, False]
    assert result.host_bytes_G.sum() == 0


def test_blocks_over_the_network_let_calls_between_their_chunks():
    # A chunk of 256 bytes occupies the line for 2 s, a block for 6: chunks to server 0
    # begin at 8, 10, 12. The call of 8.5 goes out at 9.0 behind the chunk to server 1
    # until 10: but the chunk event of 10 came later, so 10.125 and + .0625 there.
    requests = asked(*early(4), (0, 8.5, 1, 1, "a"), (0, 40.0, 1, 1, "a"))
    loop, result = serve(requests, "network", period_s=8.0, chunk_bytes=256)
    # Computed 10.4375; the way back is held by the chunk that began at 10 until 12.
    assert loop.finish_R.tolist()[4:] == [12.1875, 40.75]
    assert result.bytes_NN["migrate"].tolist() == [[0, 768], [768, 0]]
    # To server 0 the chunks end at 10, 12 and, behind the result, 14.125; + .0625,
    # then 1.125 over the host link.
    assert loop.migrations[0].done_s == 15.3125


def test_old_statistics_can_be_forgotten():
    loop, _ = serve(asked(*early(4), (0, 20.0, 1, 1, "a")), period_s=30.0, keep=0.5)
    assert loop.unfinished == 0
    with pytest.raises(ConfigError, match=r"keep must lie in \[0, 1\], got 1.5"):
        MigrationPolicy(Fixed(), keep=1.5)
    with pytest.raises(ConfigError, match="period_s must be positive, got 0"):
        MigrationPolicy(Fixed(), period_s=0)
    with pytest.raises(ConfigError, match="unknown source of blocks 'disk'"):
        MigrationPolicy(Fixed(), source="disk")

import itertools

import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.offload.evict_lfu import Lfu
from moe_edge.place.migration_policy import MigrationPolicy
from moe_edge.predict.history import PreviousToken
from moe_edge.schedule.to_idle import ToIdle
from moe_edge.simulate.cluster.loop import ClusterLoop, LoopOptions
from moe_edge.simulate.cluster.offload import OffloadPolicy
from tests.support.tiny_cluster import (
    Fixed,
    asked,
    constant_pools,
    placed,
    run,
    tiny_costs,
)

ALONE = OffloadPolicy(eviction="lru", predictor="none")
POOLS = constant_pools(2, a=[[0], [1]], b=[[1], [0]])


def serve(requests, gpus=(1,), slots=2, policy=ALONE, redirect=False):
    costs = tiny_costs(gpus, slots)
    schedule = ToIdle(1, lambda n, m: costs.send_s(n, m, 1)) if redirect else None
    return run(requests, None, costs, POOLS, schedule=schedule, offload=policy)


def test_misses_are_loaded_once_and_computed_as_they_come():
    requests = asked((0, 0.0, 3, 2, "a"), (0, 6.0, 1, 1, "b"), (0, 7.0, 1, 1, "a"))
    loop, result = serve(requests)
    # Layer 0: dense .5, loaded 1.625, computed 1.875; layer 1: 2.375, 3.5, 3.75.
    # The second token finds both: 2 x .75 -> 5.25. Request 1 asks for the two other
    # blocks: 6 + 3.75 = 9.75 and takes the slots; request 2 the same again.
    assert loop.first_R.tolist() == [3.75, 9.75, 13.5]
    assert loop.finish_R.tolist() == [5.25, 9.75, 13.5]
    assert result.host_bytes_G.tolist() == [6 * 768]
    assert result.facts["hit_ratio"] == 0.25


def test_objects_and_classes_serve_as_names_do():
    requests = asked((0, 0.0, 3, 2, "a"), (0, 6.0, 1, 1, "b"), (0, 7.0, 1, 1, "a"))
    named, _ = serve(requests, policy=OffloadPolicy("lfu", "previous"))
    given, _ = serve(requests, policy=OffloadPolicy(Lfu(), PreviousToken))
    assert given.finish_R.tolist() == named.finish_R.tolist()


@pytest.mark.parametrize(
    "given, text",
    [
        ({"eviction": "smoe_score"}, "eviction policy smoe_score needs scores, and re"),
        ({"predictor": "shadow"}, "predictor shadow needs shadow, and requests in com"),
        ({"eviction": "least"}, "unknown eviction policy 'least'; known: belady"),
    ],
)
def test_policies_that_need_more_than_choices_are_refused(given, text):
    with pytest.raises(ConfigError, match=text):
        OffloadPolicy(**given)


def test_all_blocks_fit_then_every_block_is_loaded_once():
    requests = asked((0, 0.0, 3, 2, "a"), (0, 6.0, 1, 1, "b"), (0, 12.0, 1, 1, "a"))
    loop, _ = serve(requests, slots=4)
    assert loop.finish_R.tolist() == [5.25, 9.75, 13.5]
    assert loop.memory.hit_ratio == 0.5


def test_two_gpus_load_their_own_blocks():
    # Block e belongs to GPU e mod 2: 0 of layer 0 to GPU 0, 1 of layer 1 to GPU 1.
    loop, result = serve(asked((0, 0.0, 1, 1, "a")), gpus=(2,))
    assert loop.finish_R.tolist() == [3.75]
    assert result.host_bytes_G.tolist() == [768, 768]


def test_busy_server_passes_requests_on_to_an_idle_one():
    requests = asked((0, 0.0, 1, 1, "a"), (0, 0.25, 4, 1, "a"), (0, 0.375, 1, 1, "a"))
    loop, result = serve(requests, (1, 1), redirect=True)
    # Request 1: 4 token ids, 16 bytes -> .4375 at server 1, 3.75 there, 4 bytes back
    # in .03125 + .0625. Request 2 finds one busy, one promised: waits, then hits.
    assert loop.finish_R.tolist() == [3.75, 4.28125, 5.25]
    assert result.bytes_NN["prompt"].tolist() == [[0, 16], [4, 0]]
    assert result.facts["redirected"] == 1
    assert serve(requests, (1, 1))[0].finish_R.tolist() == [3.75, 5.25, 6.75]


def test_a_gpu_without_room_for_its_share_of_a_layer_is_refused():
    with pytest.raises(CapacityError, match="holds 1 blocks that .* a layer, 2"):
        serve(asked((0, 0.0, 1, 1, "a")), slots=1)
    loop, _ = serve(asked((0, 0.0, 1, 1, "a")), gpus=(2,), slots=1)
    assert loop.finish_R.tolist() == [3.75]


def test_a_block_that_was_foreseen_is_loaded_while_its_layer_waits():
    # Request 0 teaches: afterwards what it chose is expected, in the next layer or
    # token. So request 1 ends with a wrong guess, which suits request 2.
    policy = OffloadPolicy(eviction="lru", predictor="moe_infinity")
    requests = asked((0, 0.0, 1, 1, "a"), (0, 10.0, 1, 1, "b"), (0, 20.0, 1, 1, "a"))
    loop, _ = serve(requests, policy=policy)
    # Request 2: layer 0 is there at 20.5. Its block of layer 1 is asked for at once and
    # there at 21.625; routed at 21.25, computed at 21.875 instead of 22.625.
    assert loop.finish_R.tolist() == [3.75, 13.75, 21.875]
    assert loop.memory.layer_steps[0][0].counters[True].late == 1


def test_a_placement_stays_and_what_a_server_lacks_is_loaded():
    # Half of 4 slots is the placement's. Server 0 holds block 0 of layer 0; block 1 of
    # layer 1 it lacks, although server 1 holds it: nobody is asked.
    half = OffloadPolicy("lru", "none", share=0.5)
    here = placed([[0, -1], [0, -1]], [[-1, 0], [-1, 0]])
    requests = asked((0, 0.0, 1, 2, "a"))
    costs = tiny_costs((1, 1), 4)
    loop, result = run(requests, here, costs, POOLS, offload=half)
    # Layer 0: .75. Layer 1: dense 1.25, loaded 2.375, computed 2.625. Then it is there.
    assert loop.first_R.tolist() == [2.625] and loop.finish_R.tolist() == [4.125]
    assert result.host_bytes_G.tolist() == [768, 0]
    assert result.remote_calls == 0 and not result.bytes_NN["call"].any()
    assert result.facts["hit_ratio"] == 0.5


def test_a_migrating_cluster_may_load_what_its_servers_lack():
    # Server 0 asks for block 1 of both layers, server 1 for block 0 (domains c and d),
    # and are told the contrary. Each server's cache has room for one layer's blocks.
    pools = constant_pools(2, c=[[1], [1]], d=[[0], [0]])
    wrong = placed([[0, -1], [0, -1]], [[-1, 0], [-1, 0]])
    right = [[[-1, 0], [-1, 0]], [[0, -1], [0, -1]]]
    rows = [(n, 4.0 * i, 1, 2, "cd"[n]) for i in range(20) for n in (0, 1)]
    costs = tiny_costs((1, 1), 4)
    migration = MigrationPolicy(16.0, placer=Fixed(right), hysteresis=0.0)
    half = OffloadPolicy("lru", "none", share=0.5)
    both, result = run(
        asked(*rows), wrong, costs, pools, offload=half, migration=migration
    )
    alone, _ = run(asked(*rows), wrong, costs, pools, offload=half)
    first, *later = both.migration.migrations
    # A lacking block costs a copy, 1.125 s: 2 layers x 2 tokens x 8 requests.
    assert first.decision.adopt and first.decision.current_s == 32 * 1.125
    assert first.done_s is not None and not any(m.decision.adopt for m in later)
    assert both.migration.placement.gpu_NLE.tolist() == right
    assert result.facts["migrated"] == 1 and result.facts["peak_memory"] == 1.5
    assert not result.bytes_NN["call"].any() and result.local_ratio == 1
    assert both.memory.layer_steps[0][0].counters[True].misses == 2
    latency_s = both.finish_R - [row[1] for row in rows]
    assert (latency_s[-4:] == 2 * 2 * 0.75).all()
    assert both.finish_R[0] == alone.finish_R[0]


def test_hit_ratio_of_a_run_that_looked_nothing_up_is_none():
    half = OffloadPolicy("lru", "none", share=0.5)
    here = placed([[0, 0], [0, 0]])
    costs = tiny_costs((1,), 8)
    loop, result = run(asked((0, 0.0, 1, 1, "a")), here, costs, POOLS, offload=half)
    assert loop.memory.hit_ratio is None
    assert result.row()["hit_ratio"] is None and result.row()["redirected"] == 0


def test_a_host_link_does_one_thing_at_a_time_also_while_blocks_migrate():
    # Each server is asked for what the other holds; its cache has room for a third.
    rng = np.random.default_rng(0)
    ids = {name: rng.integers(2, 4, (3, 1)) for name in "abc"}
    ids |= {name: rng.integers(0, 2, (3, 1)) for name in "def"}
    pools = constant_pools(4, **ids)
    here = np.array([[[0, 0, -1, -1]] * 3, [[-1, -1, 0, 0]] * 3])
    order = [(i, n) for i in range(20) for n in (0, 1)]
    rows = [(n, 3.0 * i, 1, 2, ("abc", "def")[n][i % 3]) for i, n in order]
    migration = MigrationPolicy(7.0, placer=Fixed(here[::-1].tolist()), hysteresis=0.0)
    loop = ClusterLoop(
        *(asked(*rows), placed(*here), tiny_costs((1, 1), 10), pools),
        LoopOptions(timeline_s=1e9),
        migration=migration,
        offload=OffloadPolicy("lru", share=0.4),
    )
    loop.run()
    copies = [row for row in loop.spans.rows if row[0] == "host"]
    assert {"demand", "prefetch", "migrate"} == {row[2] for row in copies}
    for gpu in (0, 1):
        spans = sorted((row[3], row[3] + row[4]) for row in copies if row[1] == gpu)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))

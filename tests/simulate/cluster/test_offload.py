import pytest

from moe_edge.core.checks import CapacityError
from moe_edge.simulate.cluster.offload import OffloadLoop, OffloadPolicy
from tests.support.tiny_cluster import asked, constant_pools, run, tiny_costs

ALONE = OffloadPolicy(eviction="lru", predictor="none")
POOLS = constant_pools(2, a=[[0], [1]], b=[[1], [0]])


def serve(requests, gpus=(1,), slots=2, policy=ALONE):
    costs = tiny_costs(gpus, slots)
    return run(requests, None, costs, POOLS, OffloadLoop, policy=policy)


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


def test_all_blocks_fit_then_every_block_is_loaded_once():
    requests = asked((0, 0.0, 3, 2, "a"), (0, 6.0, 1, 1, "b"), (0, 12.0, 1, 1, "a"))
    loop, _ = serve(requests, slots=4)
    assert loop.finish_R.tolist() == [5.25, 9.75, 13.5]
    assert loop.hit_ratio == 0.5


def test_two_gpus_load_their_own_blocks():
    # Block e belongs to GPU e mod 2: 0 of layer 0 to GPU 0, 1 of layer 1 to GPU 1.
    loop, result = serve(asked((0, 0.0, 1, 1, "a")), gpus=(2,))
    assert loop.finish_R.tolist() == [3.75]
    assert result.host_bytes_G.tolist() == [768, 768]


def test_busy_server_passes_requests_on_to_an_idle_one():
    requests = asked((0, 0.0, 1, 1, "a"), (0, 0.25, 4, 1, "a"), (0, 0.375, 1, 1, "a"))
    loop, result = serve(
        requests, (1, 1), policy=OffloadPolicy("lru", "none", redirect=True)
    )
    # Request 1: 4 token ids, 16 bytes -> .4375 at server 1, 3.75 there, 4 bytes back
    # in .03125 + .0625. Request 2 finds one busy, one promised: waits, then hits.
    assert loop.finish_R.tolist() == [3.75, 4.28125, 5.25]
    assert result.bytes_NN["prompt"].tolist() == [[0, 16], [4, 0]]
    assert result.facts["redirected"] == 1
    assert serve(requests, (1, 1))[0].finish_R.tolist() == [3.75, 5.25, 6.75]


def test_a_gpu_without_room_for_its_share_of_a_layer_is_refused():
    with pytest.raises(CapacityError, match="holds 1 blocks.*share of a layer, 2"):
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
    assert loop.managers[0][0].counters[True].late == 1

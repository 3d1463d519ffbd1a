import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.hardware.cost_model import BlockShape, CostModel, DenseLayer
from moe_edge.hardware.specs import Cluster, Device, Gpu, Link, Server

BLOCK = BlockShape(d_model=4, expert_dim=8, bytes_per_value=2)  # 96 values, 192 bytes
DEVICE = Device(
    name="d",
    memory_bytes=10**4,
    flops_per_s=192.0,  # one token a second
    memory_bytes_per_s=64.0,  # a block in 3 seconds
    call_s=0.5,
    source="t",
)
COSTS = CostModel(
    Cluster(
        servers=tuple(
            Server(
                name=name,
                gpus=(
                    Gpu(device=DEVICE, host_link=Link(bytes_per_s=96.0, source="t")),
                ),
            )
            for name in "ab"
        ),
        network=Link(bytes_per_s=16.0, latency_s=0.25, source="t"),
        links={(1, 0): Link(bytes_per_s=8.0, source="t")},
    ),
    BLOCK,
    DenseLayer(192.0, 192),
)


def test_block_sizes():
    assert (BLOCK.num_bytes, BLOCK.token_bytes, BLOCK.flops(2)) == (192, 8, 384)


def test_compute_is_bound_by_memory_then_by_arithmetic():
    assert COSTS.compute_s(0, 0, np.array([0, 1, 3, 5])).tolist() == [0, 3.5, 3.5, 5.5]
    assert COSTS.compute_s(0, 0, 5) == 5.5
    assert COSTS.dense_s(0, np.array([0, 4])).tolist() == [0, 4.5]


def test_copies_and_messages():
    assert COSTS.load_s(0, 0) == 2.0
    assert COSTS.send_s(0, 1, np.array([0, 2])).tolist() == [0, 1.25]
    assert COSTS.send_s(1, 0, 2) == 2.0
    assert COSTS.send_s(0, 0, 2) == 0.0
    assert COSTS.move_s(0, 1, 0) == 12.0 + 0.25 + 2.0
    assert COSTS.move_s(1, 1, 0) == 2.0


def test_bad_numbers_are_refused():
    with pytest.raises(ConfigError, match="token counts must be 0 or more, got -192"):
        COSTS.compute_s(0, 0, -1)
    with pytest.raises(ConfigError, match="block expert_dim must be positive, got 0"):
        BlockShape(4, 0, 2)

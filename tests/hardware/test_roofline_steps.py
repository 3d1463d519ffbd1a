"""Costs of steps by a roofline: two cases by hand, and what holds everywhere."""

import dataclasses
import itertools

import pytest

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.hardware.cost_model import BlockShape, DenseLayer
from moe_edge.hardware.models import ModelShape, model_shape
from moe_edge.hardware.presets import device
from moe_edge.hardware.roofline_steps import roofline_costs
from moe_edge.hardware.specs import Device
from moe_edge.hardware.step_costs import StepCosts

# 1,000 operations and 100 bytes a second, 0.5 s a call.
SLOW = Device(
    name="slow",
    memory_bytes=10_000,
    flops_per_s=1000.0,
    memory_bytes_per_s=100.0,
    call_s=0.5,
    source="by hand",
)
# Blocks of 3 * 2 * 4 weights of 2 bytes: 48 bytes, 48 operations a token.
SMALL = ModelShape(
    name="small",
    num_layers=2,
    num_experts=4,
    top_k=2,
    block=BlockShape(2, 4, 2),
    dense=DenseLayer(20.0, 30),
    source="by hand",
    once=DenseLayer(10.0, 50),
)


def test_a_step_by_hand():
    costs = roofline_costs(SLOW, SMALL, max_batch=2)
    # One token at K 1 reads one expert: 2 (.5 + .3 + .5 + .48) + .5 + .5.
    assert costs.decode_s(1, 1) == pytest.approx(4.56)
    # Two at K 2 read 4 (1 - (1 / 2)^2) = 3: 2 (.5 + .3 + .5 + 1.44) + 1.
    assert costs.decode_s(2, 2) == pytest.approx(6.48)
    # 1,024 tokens are bound by arithmetic: 2 (1 + 20.48 + 2 * 49.152) + .5 + 10.24.
    assert costs.prefill_s(1024, 2) == pytest.approx(250.308)
    assert costs.source == "simulated: small on slow by its roofline"
    assert StepCosts.of_json(costs.to_json()) == costs


def test_parts_of_experts_cost_what_they_are_of_one():
    whole = roofline_costs(SLOW, SMALL, max_batch=4)
    parts = roofline_costs(SLOW, SMALL, max_batch=4, sub_experts=4)
    assert parts.decode.ks == list(range(1, 9))
    assert parts.decode_s(1, 4) == pytest.approx(whole.decode_s(1, 1))
    assert parts.decode_s(1, 5) < whole.decode_s(1, 2)
    # Parts of several rows are spread over more experts.
    assert parts.decode_s(4, 4) >= whole.decode_s(4, 1)


@pytest.mark.parametrize(
    "model, gb", [("olmoe_1b_7b", 13.8), ("deepseek_v2_lite", 31.4)]
)
def test_models_of_the_paper_on_a_large_device(model, gb):
    shape, large = model_shape(model), device("h200")
    held = shape.num_experts * shape.block.num_bytes + shape.dense.num_bytes
    needed = shape.num_layers * held + shape.once.num_bytes
    assert needed / 1e9 == pytest.approx(gb, rel=0.03)
    costs = roofline_costs(large, shape, sub_experts=4)
    for table in (costs.decode, costs.prefill):
        for seconds in table.seconds:  # more experts cost more
            assert all(a <= b for a, b in itertools.pairwise(seconds))
        for fewer, more in itertools.pairwise(table.seconds):
            assert all(a <= b for a, b in zip(fewer, more, strict=True))
    eight = costs.decode_s(8, 4 * shape.top_k)
    assert costs.decode_s(1, 4 * shape.top_k) < eight < 0.05
    assert eight < 8 * costs.decode_s(1, 4 * shape.top_k)  # batches gain


def test_what_cannot_be_computed_is_refused():
    with pytest.raises(CapacityError, match="small has 0.0 GB .* slow holds 0.0 GB"):
        roofline_costs(dataclasses.replace(SLOW, memory_bytes=100), SMALL)
    with pytest.raises(CapacityError, match="deepseek_v2_lite has 31.* rtx_4090 holds"):
        roofline_costs(device("rtx_4090"), model_shape("deepseek_v2_lite"))
    with pytest.raises(ConfigError, match="4 neurons do not split into 3 equal sub"):
        roofline_costs(SLOW, SMALL, sub_experts=3)
    with pytest.raises(ConfigError, match="max_batch must be a positive whole .*got 0"):
        roofline_costs(SLOW, SMALL, max_batch=0)

"""What steps cost on a device by its roofline: machines and models that are not here.

A step reads what it needs of the weights and computes with it; each layer makes two
calls, its dense part and its experts, and the step one more. Which experts tokens
choose is drawn evenly and independently: of E experts n tokens choose
E (1 - (1 - K / E)^n). KV caches, activations and padding are not counted, so long
contexts cost more than it says.
"""

from collections.abc import Sequence

from moe_edge.core.checks import CapacityError, check_count, check_divides
from moe_edge.hardware.cost_model import roofline_s
from moe_edge.hardware.models import ModelShape
from moe_edge.hardware.specs import Device
from moe_edge.hardware.step_costs import CostTable, StepCosts

MOST_TOKENS = 4096  # of prompts; beyond them the table goes on


def roofline_costs(
    device: Device, shape: ModelShape, *, sub_experts: int = 1, max_batch: int = 16
) -> StepCosts:
    """Costs of a model whose weights are all on a device.

    Args:
      sub_experts: parts of each expert; K counts them.
      max_batch: most rows of a decode step.
    Raises:
      ConfigError: parts into which no expert splits; CapacityError: the model does not
        fit the device.
    """
    check_count("max_batch", max_batch)
    check_divides("sub-experts", sub_experts, "neurons", shape.block.expert_dim)
    layer_bytes = shape.num_experts * shape.block.num_bytes + shape.dense.num_bytes
    needed = shape.num_layers * layer_bytes + shape.once.num_bytes
    if needed > device.memory_bytes:
        raise CapacityError(
            f"{shape.name} has {needed / 1e9:.1f} GB of weights, {device.name} holds "
            f"{device.memory_bytes / 1e9:.1f} GB; take a larger device"
        )
    ks = list(range(1, shape.top_k * sub_experts + 1))
    rows = [n for n in range(1, max_batch + 1) if n <= 16 or not n % 8]
    rows = sorted({*rows, max_batch})
    tokens = [1 << i for i in range(MOST_TOKENS.bit_length())]

    def table(sizes: Sequence[int]) -> CostTable:
        seconds = [
            [_step_s(device, shape, sub_experts, n, k) for k in ks] for n in sizes
        ]
        return CostTable(sizes, ks, seconds)

    source = f"simulated: {shape.name} on {device.name} by its roofline"
    return StepCosts(table(rows), table(tokens), source)


def _step_s(
    device: Device, shape: ModelShape, sub_experts: int, tokens: int, k: int
) -> float:
    experts, block = shape.num_experts * sub_experts, shape.block
    chosen = experts * (1 - (1 - k / experts) ** tokens)
    layer = roofline_s(
        device, shape.dense.flops_per_token * tokens, shape.dense.num_bytes
    )
    layer += roofline_s(
        device,
        block.flops(tokens * k) / sub_experts,
        chosen * block.num_bytes / sub_experts,
    )
    once = shape.once.flops_per_token * tokens
    once_s = roofline_s(device, once, shape.once.num_bytes)
    return float(shape.num_layers * layer + once_s)

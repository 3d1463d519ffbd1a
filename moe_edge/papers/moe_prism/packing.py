"""What smaller blocks gain in memory that is not a multiple of an expert; pure.

MoE-Prism, section 6.2.3: a fragment too small for an expert holds some of its
sub-experts. The paper gives every layer an equal share of the memory, so a fragment is
left in each of them; ours is one pool of slots over all layers, which leaves one.
"""

from moe_edge.core.checks import check_count, check_from_zero, check_positive


def resident_share(
    memory_bytes: float,
    expert_bytes: float,
    layers: int,
    experts: int,
    sub_experts: int = 1,
    *,
    pooled: bool = False,
) -> float:
    """Share of a model's experts that have a slot.

    Args:
      memory_bytes: for experts, of the device.
      experts: of each layer; sub_experts: of each expert, 1: whole ones.
      pooled: one pool over all layers, in place of an equal part for each.
    """
    check_from_zero("memory_bytes", memory_bytes)
    check_positive("expert_bytes", expert_bytes)
    for name, count in (
        ("layers", layers),
        ("experts", experts),
        ("sub_experts", sub_experts),
    ):
        check_count(name, count)
    parts = 1 if pooled else layers
    blocks = layers * experts * sub_experts // parts  # of a part
    slots = int(memory_bytes / parts * sub_experts // expert_bytes)
    return min(slots, blocks) / blocks

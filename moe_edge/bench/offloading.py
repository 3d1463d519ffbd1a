"""Options of offloaded engines in studies: what their results were measured with.

They say mode and slot plan themselves, so that an entry keeps its meaning where the
defaults of `OffloadOptions`, which are made for users, change.
"""

from moe_edge.engine.offload_options import OffloadOptions


def studied(**options) -> OffloadOptions:
    """Options of mode layered with one pool of slots, but for what is said."""
    return OffloadOptions(**{"mode": "layered", "slot_plan": "one_pool"} | options)

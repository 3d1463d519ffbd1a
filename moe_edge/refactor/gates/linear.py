"""The linear gate: one router row for every sub-expert.

MoE-Prism, section 4.3.2, before any training: a copy of the parent's row. All blocks
of an expert then tie, and ties go to the lower block, the more important one; so
K = U j chooses exactly the parent's j experts, other K the next one's first blocks too.
"""

import numpy as np

# Dense tensors that have one row or entry an expert.
ROUTER_TENSORS = ("router.weight", "router.bias", "router.correction_bias")


def repeat_router(dense: dict[str, np.ndarray], subs: int) -> dict[str, np.ndarray]:
    """A layer's dense tensors with each parent's router row repeated.

    Args:
      dense: canonical name -> array of a MoE layer.
      subs: U.
    """
    return {
        name: np.repeat(array, subs, axis=0) if name in ROUTER_TENSORS else array
        for name, array in dense.items()
    }

"""The linear gate: repeated router rows, and the order of sub-experts they need.

MoE-Prism, section 4.3.2, before any training: a copy of the parent's row. All blocks
of an expert then tie, and ties go to the lower block; so K = U j chooses exactly the
parent's j experts, other K the next one's first blocks too. Ids are therefore given by
importance. Under a proxy gate the order only breaks ties.
"""

import numpy as np

from moe_edge.papers.moe_prism.refactor.partition.objective import renumbered

# Dense tensors that have one row or entry an expert.
ROUTER_TENSORS = ("router.weight", "router.bias", "router.correction_bias")
ROUTER_TENSORS += ("router.expert_scale",)


def repeat_router(
    dense: dict[str, np.ndarray], subs: int, scoring: str
) -> dict[str, np.ndarray]:
    """A layer's dense tensors with each parent's router row repeated.

    A softmax over U times as many rows gives each a U-th of its score, so a bias that
    is added to the scores for the choice is divided by U; a sigmoid does not.

    Args:
      dense: canonical name -> array of a MoE layer.
      subs: U.
      scoring: of the router, see `model/config.py`.
    """
    found = {
        name: np.repeat(array, subs, axis=0) if name in ROUTER_TENSORS else array
        for name, array in dense.items()
    }
    bias = "router.correction_bias"
    if bias in found and scoring == "softmax":
        found[bias] = (found[bias] / np.float32(subs)).astype(found[bias].dtype)
    return found


def sub_norms(
    activations_TF: np.ndarray, labels_F: np.ndarray, subs: int, neuron_F=None
) -> np.ndarray:
    """L1 norm of every sub-expert's activations: float32 `[T, U]`.

    Args:
      neuron_F: weight of each neuron, such as the norm of its down column.
    """
    members_FU = (labels_F[:, None] == np.arange(subs)).astype(np.float32)
    if neuron_F is not None:
        members_FU *= np.asarray(neuron_F, np.float32)[:, None]
    return np.abs(activations_TF, dtype=np.float32) @ members_FU


def order_subs(
    labels_F: np.ndarray,
    activations_TF: np.ndarray,
    subs: int,
    *,
    down_norms_F: np.ndarray,
    token_weights_T: np.ndarray,
    rule: str = "output",
) -> np.ndarray:
    """Labels renamed so that 0 is the most important sub-expert.

    Args:
      activations_TF: of tokens routed to the expert.
      down_norms_F: length of each neuron's down column.
      token_weights_T: router weight of the expert for each token.
      rule: "output": mean of router weight x L1 norm of activations times down norms;
        "activation": mean L1 norm of activations; "usage": how often a block is its
        expert's largest.
    """
    norms_TU = sub_norms(
        activations_TF, labels_F, subs, None if rule == "activation" else down_norms_F
    )
    if rule == "usage":
        value_U = np.bincount(np.argmax(norms_TU, axis=1), minlength=subs)
    elif rule == "activation":
        value_U = norms_TU.mean(axis=0)
    else:
        value_U = token_weights_T.astype(np.float32) @ norms_TU
    return renumbered(labels_F, value_U)

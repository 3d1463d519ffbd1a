"""The order of sub-experts that a linear gate needs, whose router rows are repeated.

MoE-Prism, section 4.3.2, before any training: a copy of the parent's row. All blocks
of an expert then tie, and ties go to the lower block; so K = U j chooses exactly the
parent's j experts, other K the next one's first blocks too. Ids are therefore given by
importance. Under a proxy gate the order only breaks ties.
"""

import numpy as np

from moe_edge.papers.moe_prism.refactor.partition.objective import renumbered


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

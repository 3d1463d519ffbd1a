"""How much each expert matters to the tokens that choose it, from a profile.

Source: REAP (arXiv 2510.13999): the mean over an expert's tokens of its gate weight
times the norm of its output. Ours reads both from the sample of tokens that a profile
keeps, so no model runs.
"""

import numpy as np

from moe_edge.checkpoint.dtypes import cast
from moe_edge.core.progress import progress
from moe_edge.profile.reader import Profile


def reap(reader, profile: Profile) -> np.ndarray:
    """float64 [L of MoE layers, E]: 0 for an expert that no token chose.

    Args:
      reader: the checkpoint that was profiled, in floats.
    """
    layout = reader.layout
    found_LE = np.zeros((len(profile.layers), profile.num_experts))
    record_1R = np.empty((1, layout.size), reader.dtype)
    for row, layer in enumerate(progress(profile.layers, "layers weighed")):
        for expert in range(profile.num_experts):
            weights_S = profile.gate_weights(layer, expert)
            if not len(weights_S):
                continue
            reader.read_experts(layer, expert, record_1R)
            record_R = cast(record_1R[0], np.dtype(np.float32))
            rows_SF = profile.activations(layer, expert).astype(np.float32)
            out_SD = rows_SF @ layout.part(record_R, "down").T
            if layout.has_bias:
                out_SD += layout.part(record_R, "down_bias")
            norm_S = np.linalg.norm(out_SD, axis=1)
            found_LE[row, expert] = np.mean(weights_S * norm_S, dtype=np.float64)
        reader.release()
    return found_LE


def frequency(profile: Profile) -> np.ndarray:
    """float64 [L of MoE layers, E]: share of a layer's choices, the baseline."""
    counts_LE = profile.counts_NLE.sum(axis=0)
    return counts_LE / counts_LE.sum(axis=1, keepdims=True)


def keep_best(scores_LE: np.ndarray, layers, left: int) -> dict[int, list[int]]:
    """The `left` best experts of each layer, ids rising; ties go to the lower id."""
    order_LE = np.argsort(-scores_LE, axis=1, kind="stable")[:, :left]
    return {
        layer: sorted(ids.tolist()) for layer, ids in zip(layers, order_LE, strict=True)
    }

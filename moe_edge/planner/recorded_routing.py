"""How many experts are found in slots where no routing of the model is known.

Hit ratios of least recently used in decoding, batch 1, of recorded runs: the ones that
found least and most bound what another model does. They are facts about those models,
not of this machine.
"""

import numpy as np

# Share of a layer's experts with a slot -> hit ratio.
LEAST = {0.0: 0.0, 0.1: 0.235, 0.25: 0.465, 0.5: 0.73, 1.0: 1.0}
MOST = {0.0: 0.0, 0.1: 0.547, 0.25: 0.817, 0.5: 0.958, 1.0: 1.0}
SOURCE = (
    "routing is a range between recorded runs: least the default model (6 layers, 8 of "
    "64, drawn tokens), most Qwen3-30B-A3B (results/replay_public_traces)"
)


def hit_range(share: float) -> tuple[float, float, float]:
    """Low, middle and high hit ratio at a share of the experts."""
    low, high = (
        float(np.interp(share, [*known], [*known.values()])) for known in (LEAST, MOST)
    )
    return low, (low + high) / 2, high

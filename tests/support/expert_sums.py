"""What the routed experts add, pair by pair in NumPy."""

import numpy as np


def numpy_sum(case, layout) -> np.ndarray:
    """The experts' weighted sum with SiLU, float64 `[T, D]`.

    Args:
      case: (x_TD, ids_TK, weights_TK, experts_ER); an id of E is padding.
    """
    x_TD, ids_TK, weights_TK, experts_ER = map(np.asarray, case)
    want_TD = np.zeros(x_TD.shape)
    for t, k in np.argwhere(ids_TK < len(experts_ER)):
        part = {
            name: np.asarray(layout.part(experts_ER[ids_TK[t, k]], name), np.float64)
            for name in layout.shapes
        }
        gate = part["gate"] @ x_TD[t] + part.get("gate_bias", 0)
        up = part["up"] @ x_TD[t] + part.get("up_bias", 0)
        out = part["down"] @ (gate / (1 + np.exp(-gate)) * up)
        want_TD[t] += float(weights_TK[t, k]) * (out + part.get("down_bias", 0))
    return want_TD

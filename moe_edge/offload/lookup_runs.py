"""Cuts the pairs of a lookup into runs whose experts fit into slots."""

import numpy as np


def cut_runs(ids_P: np.ndarray, num_experts: int, room: int) -> list[tuple[int, int]]:
    """Cuts pairs into contiguous runs of at most `room` distinct experts each.

    Args:
      ids_P: experts of the pairs in order; num_experts and more are no experts.
      room: slots.
    Returns:
      (first, end) of every run, covering all pairs.
    """
    runs, seen, first = [], set(), 0
    for place, expert in enumerate(ids_P.tolist()):
        if expert >= num_experts or expert in seen:
            continue
        if len(seen) == room:
            runs.append((first, place))
            seen, first = set(), place
        seen.add(expert)
    runs.append((first, len(ids_P)))
    return runs

"""Which experts the pairs of a lookup name: once each, in order, or in fitting runs."""

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


def distinct(ids_TK, scores_TE, num_experts: int) -> list[int]:
    """The experts of a lookup, each once, best score (else best rank) first."""
    if ids_TK.shape[0] == 1:
        return [expert for expert in ids_TK[0].tolist() if expert < num_experts]
    ranked = ids_TK.T.reshape(-1)  # rank 0 of every token, then rank 1, ...
    first_E = np.full(num_experts + 1, ranked.size, np.int64)
    first_E[ranked[::-1]] = np.arange(ranked.size)[::-1]
    chosen = np.flatnonzero(first_E[:num_experts] < ranked.size)
    if scores_TE is None:
        order = np.argsort(first_E[chosen])
    else:
        # Over the tokens that chose the expert: the others' scores do not count.
        token, _ = np.nonzero(ids_TK < num_experts)
        ids = ids_TK[ids_TK < num_experts]
        best_E = np.full(num_experts, -np.inf, np.float32)
        np.maximum.at(best_E, ids, scores_TE[token, ids])
        order = np.argsort(-best_E[chosen], kind="stable")
    return chosen[order].tolist()

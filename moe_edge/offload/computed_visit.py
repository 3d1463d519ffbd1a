"""A whole visit of a layer in computed time, as replay and the simulator pass it."""

from collections.abc import Callable, Sequence

import numpy as np

from moe_edge.offload.layer_step import LayerStep
from moe_edge.offload.layer_visit import LayerVisit

OnHost = Callable[[Sequence[int], np.ndarray], Sequence[int]]  # absent, ids_TK -> some


def pass_layer(
    layer_step: LayerStep,
    layer,
    ids_TK,
    scores_TE,
    step,
    sequences: Sequence[int] = (0,),
    on_host: OnHost | None = None,
) -> LayerVisit:
    """Looks up, demands, prefetches, waits and releases.

    Args:
      layer, ids_TK, scores_TE, step: as of `LayerStep.look_up`.
      sequences: of the rows, or one for all of them.
      on_host: says which absent experts a CPU assist computes; those do not travel.
    """
    visit = layer_step.enter(layer, ids_TK, scores_TE, step, sequences)
    if layer_step.fits(visit):
        taken = on_host(visit.misses, ids_TK) if on_host else ()
        visit.missed += taken
        layer_step.bring(visit, [each for each in visit.misses if each not in taken])
    else:
        for _ in layer_step.runs(visit, ids_TK):
            pass
    layer_step.finish(visit)
    return visit

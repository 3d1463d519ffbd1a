"""What a run's notes say about its costs: the observations that `cluster_fit` fits.

Every server notes who computed which pair of a token, when calls went out and came
back, and how long it computed for others; the scheduler knows when tokens came. Here
they are put together, pass by pass, in the order in which a server made its calls.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from moe_edge.cluster.outcome import (
    BYTES,
    CALLEE,
    DURATION,
    LAYER,
    PAIRS,
    REQUEST,
    SENT,
)
from moe_edge.cluster.scheduler import MethodRun
from moe_edge.hardware.cluster_fit import AnswerSeen, PassSeen, WaitSeen
from moe_edge.workload.traces import PREFILL


class Observations(NamedTuple):
    """What `cluster_fit.fit_calibration` takes."""

    passes: list[PassSeen]
    answers: list[AnswerSeen]
    waits: list[WaitSeen]


def observe(
    run: MethodRun, chunk_tokens: int, bucket: Callable[[int], int]
) -> Observations:
    """Reads the notes of a run in which requests came one after another.

    Requests whose calls were repeated, since a table had changed, are left out.

    Args:
      chunk_tokens: tokens of a prompt that pass together; longer ones are left out.
      bucket: the size of a prompt's pass, padding included.
    """
    seen = Observations([], [], [])
    answered = _answered(run)
    free_s: dict[int, float] = {}  # of a server: when its last token came
    for one in sorted((one for one in run.asked if one.done), key=lambda o: o.times_s):
        server = one.at
        begun_s = max(one.arrived_s, free_s.get(server, 0.0))
        free_s[server] = one.times_s[-1]
        if server not in answered or len(one.prompt) > chunk_tokens:
            continue
        took = np.diff([begun_s, *one.times_s]).tolist()
        sizes = [bucket(len(one.prompt))] + [1] * (len(took) - 1)
        passes = _passes(run.notes[server][1], one.id, server)
        calls = iter(answered[server].get(one.id, ()))
        part = Observations([], [], [])
        for ids_and_holders, seconds, size in zip(passes, took, sizes, strict=False):
            if not _observe_pass(part, server, size, seconds, ids_and_holders, calls):
                break
        else:
            for all_of, more in zip(seen, part, strict=True):
                all_of.extend(more)
    return seen


def _answered(run: MethodRun) -> dict[int, dict[int, list]]:
    """Of every server: request -> its calls in order, each with its computation.

    Calls of one caller are answered in their order.
    """
    found: dict[int, dict[int, list]] = {}
    for caller, (_, arrays) in run.notes.items():
        calls = arrays["calls"][np.argsort(arrays["calls"][:, SENT], kind="stable")]
        seconds_C = np.full(len(calls), np.nan)
        for callee, (_, theirs) in run.notes.items():
            mine = calls[:, CALLEE] == callee
            spent = theirs["answered"][theirs["answered"][:, 2] == caller]
            if mine.sum() == len(spent):
                seconds_C[mine] = spent[:, 1]
        by_request: dict[int, list] = {}
        for call, spent_s in zip(calls, seconds_C.tolist(), strict=True):
            by_request.setdefault(int(call[REQUEST]), []).append((call, spent_s))
        found[caller] = by_request
    return found


def _passes(arrays: dict, request: int, server: int) -> list[list[tuple]]:
    """Of every pass of a request, for every layer (layer, ids [T, K], holders)."""
    mine = np.flatnonzero(arrays["lookups_request"] == request)
    keys = [arrays[f"lookups_{name}"][mine] for name in ("layer", "step", "phase")]
    order = np.lexsort(keys)
    layer_T, step_T, phase_T = (key[order] for key in keys)
    mine = mine[order]
    pass_T = np.where(phase_T == PREFILL, -1, step_T)
    passes = []
    for number in np.unique(pass_T):
        rows = pass_T == number
        layers = []
        for layer in np.unique(layer_T[rows]).tolist():
            some = mine[rows & (layer_T == layer)]
            holders = arrays["lookups_holder_TK"][some]
            layers.append((layer, arrays["lookups_ids_TK"][some], holders))
        passes.append(layers)
    return passes


def _observe_pass(seen, server, size, seconds, layers, calls) -> bool:
    """Adds one pass; False where its calls are not those that its routing asks for."""
    waited_s, split, blocks, pairs = 0.0, 0, 0, 0
    for layer, ids_TK, holder_TK in layers:
        others = np.unique(holder_TK[holder_TK != server]).tolist()
        if not others:
            blocks += len(np.unique(ids_TK))
            pairs += ids_TK.size
            continue
        of_layer = [next(calls, None) for _ in others]
        if None in of_layer:
            return False
        if sorted((int(c[LAYER]), int(c[CALLEE])) for c, _ in of_layer) != [
            (layer, other) for other in others
        ]:
            return False
        begun_s = min(call[SENT] for call, _ in of_layer)
        last, last_s = max(of_layer, key=lambda one: one[0][SENT] + one[0][DURATION])
        took_s = last[SENT] + last[DURATION] - begun_s
        split, waited_s = split + 1, waited_s + took_s
        for call, spent_s in of_layer:
            asked = np.unique(ids_TK[holder_TK == int(call[CALLEE])])
            if not np.isnan(spent_s):
                seen.answers.append(
                    AnswerSeen(
                        *(int(call[CALLEE]), size, len(asked), int(call[PAIRS])),
                        seconds=spent_s,
                    )
                )
        if not np.isnan(last_s):
            num_bytes = int(last[BYTES])
            seen.waits.append(WaitSeen(len(others), took_s, last_s, num_bytes))
    counted = (len(layers), split, waited_s, blocks, pairs)
    seen.passes.append(PassSeen(server, size, seconds, *counted))
    return True

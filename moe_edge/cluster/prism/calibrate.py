"""What a cluster's run costs, from what its servers noted: its calibrations.

Every server notes who computed which pair of a token, when calls went out and came
back, and how long it computed for others; the scheduler knows when tokens came. Here
they are put together, pass by pass, in the order in which a server made its calls;
`hardware/cluster_fit.py` finds the costs that explain them.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from moe_edge.cluster.prism.method import MethodRun
from moe_edge.cluster.prism.outcome import (
    BYTES,
    CALLEE,
    DURATION,
    LAYER,
    PAIRS,
    REQUEST,
    ROWS,
    SENT,
    STATES,
    calls_of,
    payload_bytes,
)
from moe_edge.hardware.cluster_calibration import ClusterCalibration, Messages
from moe_edge.hardware.cluster_fit import (
    AnswerSeen,
    PassSeen,
    WaitSeen,
    fit_calibration,
)
from moe_edge.workload.traces import PREFILL

STATE_VALUE_BYTES = 4  # hidden states and rows travel as float32
PAIR_BYTES = 4  # numbers of token and block
UNSEEN_LOAD_S = 1e-3  # of a block, where none was loaded


class Observations(NamedTuple):
    """What `cluster_fit.fit_calibration` takes."""

    passes: list[PassSeen]
    answers: list[AnswerSeen]
    waits: list[WaitSeen]


def calibration_of(
    runs: Sequence[MethodRun],
    *,
    d_model: int,
    chunk_tokens: int,
    bucket: Callable[[int], int],
    line_bytes_per_s: float,
    source: str,
) -> ClusterCalibration:
    """The costs of all that was served in some runs over the same servers.

    What processes lose to each other on cores that they share is in the times that
    servers note, the more of them the more servers have requests (`compute_slowdown`).
    So it must not be simulated once more: the calibration says that each server has two
    cores of its own, one a thread.

    Args:
      chunk_tokens: of a prompt that pass together.
      bucket: the size of a prompt's pass of so many tokens, padding included.
      line_bytes_per_s: payload that a server's line carries.
      source: how and where the runs were made.
    Raises:
      ConfigError: too little was served.
    """
    seen = Observations([], [], [])
    for run in runs:
        for all_of, more in zip(seen, observe(run, chunk_tokens, bucket), strict=True):
            all_of.extend(more)
    sizes = Messages(
        base_s=0.0,
        each_s=0.0,
        bytes_per_s=line_bytes_per_s,
        call_bytes=_header_bytes(runs, d_model),
        token_bytes=STATE_VALUE_BYTES * d_model,
        pair_bytes=PAIR_BYTES,
        row_bytes=STATE_VALUE_BYTES * d_model,
    )
    servers = len(runs[0].keeper.held_NLE)
    load_s = [_load_s(runs)] * servers
    found = fit_calibration(*seen, load_s=load_s, sizes=sizes, source=source)
    return dataclasses.replace(found, cores=[2] * servers)


def _notes(runs: Iterable[MethodRun]) -> list[tuple[dict, dict]]:
    return [note for run in runs for note in run.notes.values()]


def _header_bytes(runs: Sequence[MethodRun], d_model: int) -> int:
    """Of a call and its answer, besides states, rows and pairs."""
    notes = _notes(runs)
    calls = np.concatenate([arrays["calls"] for _, arrays in notes])
    states, rows, pairs = (calls[:, column].sum() for column in (STATES, ROWS, PAIRS))
    payload = payload_bytes([facts for facts, _ in notes])
    payload -= STATE_VALUE_BYTES * d_model * (states + rows) + PAIR_BYTES * pairs
    return max(0, round(payload / max(len(calls), 1)))


def _load_s(runs: Sequence[MethodRun]) -> float:
    """Seconds of a block from the checkpoint into a slot."""
    brought = np.concatenate([arrays["brought"] for _, arrays in _notes(runs)])
    own = brought[brought[:, 4] < 0]
    return float(np.median(own[:, 1])) if len(own) else UNSEEN_LOAD_S


def observe(
    run: MethodRun, chunk_tokens: int, bucket: Callable[[int], int]
) -> Observations:
    """Reads the notes of one run; arguments as `calibration_of`.

    Left out: prompts of several chunks, and requests whose calls were made again, since
    a table had changed.
    """
    seen, calls = Observations([], [], []), _calls(run)
    times_s: dict[int, list[float]] = {}  # of every server, when a token came
    spans_s: dict[int, list[tuple]] = {}  # and from when to when it had a request
    for one in run.asked:
        if one.times_s:
            times_s.setdefault(one.at, []).extend(one.times_s)
            spans_s.setdefault(one.at, []).append((one.arrived_s, one.times_s[-1]))
    for one in run.asked:
        server = one.at
        if not one.done or server not in calls or len(one.prompt) > chunk_tokens:
            continue
        ends_X = np.sort([one.arrived_s, *times_s[server]])  # of passes, in turn
        begun = ends_X[np.searchsorted(ends_X, one.times_s) - 1]
        took = (np.array(one.times_s) - np.maximum(begun, one.arrived_s)).tolist()
        sizes = [bucket(len(one.prompt)), *[1] * (len(took) - 1)]
        passes = _passes(run.notes[server][1], one.id)
        busy = _busy(spans_s.values(), np.array(one.times_s) - np.array(took) / 2)
        left, part = iter(calls[server].get(one.id, ())), Observations([], [], [])
        if len(passes) == len(took) and all(
            _observe_pass(part, server, *what, left)
            for what in zip(sizes, took, busy, passes, strict=True)
        ):
            for all_of, more in zip(seen, part, strict=True):
                all_of.extend(more)
    return seen


def _busy(spans_s: Iterable[Sequence[tuple]], at_T: np.ndarray) -> list[int]:
    """How many servers had requests at some times.

    Args:
      spans_s: of every server when each request came and ended.
    """
    count_T = np.zeros(len(at_T), int)
    for spans in spans_s:
        begun_R, ended_R = np.array(spans).T
        here_TR = (begun_R <= at_T[:, None]) & (at_T[:, None] < ended_R)
        count_T += here_TR.any(axis=1)
    return count_T.tolist()


def _calls(run: MethodRun) -> dict[int, dict[int, list[tuple[np.ndarray, float]]]]:
    """Of every server: request -> its calls in order, and the callee's seconds."""
    found: dict[int, dict[int, list]] = {}
    for caller, (calls, seconds_C) in calls_of(run).items():
        by_request = found[caller] = {}
        for call, spent_s in zip(calls, seconds_C.tolist(), strict=True):
            by_request.setdefault(int(call[REQUEST]), []).append((call, spent_s))
    return found


def _passes(arrays: dict, request: int) -> list[list[tuple]]:
    """Of every pass of a request, for every layer (layer, ids [T, K], holders)."""
    mine = np.flatnonzero(arrays["lookups_request"] == request)
    layer_T = arrays["lookups_layer"][mine]
    prompt_T = arrays["lookups_phase"][mine] == PREFILL
    pass_T = np.where(prompt_T, -1, arrays["lookups_step"][mine])
    passes = []
    for number in np.unique(pass_T):
        layers = []
        for layer in np.unique(layer_T).tolist():
            some = mine[(pass_T == number) & (layer_T == layer)]
            holders = arrays["lookups_holder_TK"][some]
            layers.append((layer, arrays["lookups_ids_TK"][some], holders))
        passes.append(layers)
    return passes


def _observe_pass(seen, server, size, seconds, busy, layers, left) -> bool:
    """Adds one pass; False where its calls are not those that its routing asks for."""
    split, blocks, pairs = 0, 0, 0
    for layer, ids_TK, holder_TK in layers:
        others = np.unique(holder_TK[holder_TK != server]).tolist()
        if not others:
            blocks, pairs = blocks + len(np.unique(ids_TK)), pairs + ids_TK.size
            continue
        calls = [call for _, call in zip(others, left, strict=False)]
        made = sorted((int(call[LAYER]), int(call[CALLEE])) for call, _ in calls)
        if made != [(layer, other) for other in others]:
            return False
        begun_s = min(call[SENT] for call, _ in calls)
        last, answered_s = max(calls, key=lambda one: one[0][SENT] + one[0][DURATION])
        took_s = last[SENT] + last[DURATION] - begun_s
        split, seconds = split + 1, seconds - took_s
        for call, spent_s in calls:
            asked = np.unique(ids_TK[holder_TK == int(call[CALLEE])])
            counts = (int(call[CALLEE]), size, len(asked), int(call[PAIRS]))
            if not np.isnan(spent_s):
                seen.answers.append(AnswerSeen(*counts, spent_s, busy))
        if not np.isnan(answered_s):
            sent_s, num_bytes = took_s - answered_s, int(last[BYTES])
            seen.waits.append(WaitSeen(len(others), sent_s, num_bytes, busy))
    counts = (len(layers), split, blocks, pairs, busy)
    seen.passes.append(PassSeen(server, size, seconds, *counts))
    return True

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.workload.traces import TraceRecorder
from tests.support.traces import make_trace

WEIGHTS = np.full((2, 2), 0.5, np.float32)
HITS = np.array([[True, False], [False, False]])


def test_trace_rejects_arrays_that_disagree():
    trace = make_trace([(1, 0, 0, [1, 2])])
    with pytest.raises(
        ConfigError, match=r"scores_TE has shape \(1, 3\), expected \(1, 4\)"
    ):
        make_trace([(1, 0, 0, [1])], scores_TE=np.zeros((1, 3), np.float16))
    assert trace.holds == {"ids", "weights", "future", "profile"}


def test_trace_bounds_group_rows_of_a_step_and_layer():
    rows = [(1, 1, 0, [0]), (1, 0, 2, [1]), (1, 0, 2, [2]), (1, 0, 0, [3])]
    trace = make_trace(rows)
    assert trace.ids_TK[:, 0].tolist() == [3, 1, 2, 0]
    assert trace.bounds.tolist() == [0, 1, 3, 4]
    assert trace.num_layers == 3


def test_recorder_trace_has_what_was_added():
    recorder = TraceRecorder(num_experts=4, top_k=2)
    ids_TK = np.array([[3, 1], [0, 2]], np.int32)
    recorder.add(1, 7, 1, ids_TK, WEIGHTS, HITS, bytes=96, wait_s=0.25)
    ids_TK[:] = 0  # the engine reuses its buffer
    recorder.add(0, [5, 6], 1, [[1, 0], [2, 3]], WEIGHTS, HITS, request_T=[4, 4])
    trace = recorder.trace()
    assert trace.step.tolist() == [5, 6, 7, 7]
    assert trace.request.tolist() == [4, 4, 0, 1]
    assert trace.phase.tolist() == [0, 0, 1, 1]
    assert trace.ids_TK.tolist() == [[1, 0], [2, 3], [3, 1], [0, 2]]
    assert trace.hit_TK[2:].tolist() == HITS.tolist()
    assert trace.bytes_TK.tolist() == [[0, 0], [0, 0], [96, 0], [0, 0]]
    assert trace.wait_s_TK[2, 0] == 0.25
    assert trace.scores_TE is None
    assert len(recorder) == 2


def test_recorder_drops_padding_and_closes_gaps():
    recorder = TraceRecorder(num_experts=4, top_k=2)
    ids_TK = [[4, 4], [4, 2]]  # a padded row; a token whose best expert was dropped
    weights_TK = np.array([[0, 0], [0.1, 0.9]], np.float32)
    recorder.add(1, 0, 0, ids_TK, weights_TK, HITS | True, bytes=96)
    trace = recorder.trace()
    assert trace.request.tolist() == [1]
    assert trace.ids_TK.tolist() == [[2, -1]]
    assert trace.weights_TK.tolist() == [[np.float32(0.9), 0]]
    assert trace.bytes_TK.tolist() == [[96, 0]]
    assert trace.hit_TK.tolist() == [[True, False]]


def test_recorder_keeps_scores_of_every_lookup():
    recorder = TraceRecorder(num_experts=3, top_k=1)
    scores_TE = np.array([[0.5, 0.25, 0.125]], np.float32)
    recorder.add(1, 0, 0, [[0]], [[1.0]], [[True]], scores_TE=scores_TE)
    assert recorder.trace().scores_TE.dtype == np.float16
    assert recorder.trace().scores_TE.tolist() == scores_TE.tolist()
    assert "scores" in recorder.trace().holds
    recorder.add(1, 1, 0, [[0]], [[1.0]], [[True]])
    with pytest.raises(ConfigError, match="scores were recorded in 1 of 2 lookups"):
        recorder.trace()


def test_recorder_keeps_who_asked_and_who_computed():
    recorder = TraceRecorder(num_experts=4, top_k=2)
    ids_TK, holder_TK = [[4, 2], [1, 0]], np.array([[9, 1], [0, 2]])
    of_cluster = {"server": 2, "version": 5, "holder_TK": holder_TK}
    recorder.add(1, 0, 0, ids_TK, WEIGHTS, HITS, **of_cluster)
    holder_TK[:] = 7  # its owner's buffer
    trace = recorder.trace()
    assert (trace.server.tolist(), trace.version.tolist()) == ([2, 2], [5, 5])
    assert trace.holder_TK.tolist() == [[1, -1], [0, 2]]
    recorder.add(1, 1, 0, ids_TK, WEIGHTS, HITS)
    with pytest.raises(ConfigError, match="server were recorded in 1 of 2 lookups"):
        recorder.trace()


def test_recorder_rejects_empty_and_other_widths():
    with pytest.raises(ConfigError, match="recorded no lookup"):
        TraceRecorder(4, 2).trace()
    recorder = TraceRecorder(num_experts=4, top_k=3)
    recorder.add(1, 0, 0, [[0, 1]], [[0.5, 0.5]], [[True, True]])
    with pytest.raises(
        ConfigError, match=r"ids_TK has shape \(1, 2\), expected \(1, 3\)"
    ):
        recorder.trace()

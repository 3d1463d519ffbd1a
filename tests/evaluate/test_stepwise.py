"""Scoring by decode steps: right tokens, right rows, equal to prefill if lossless."""

import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, RequestError
from moe_edge.engine.resident import ResidentEngine
from moe_edge.evaluate.likelihood import token_log_probs
from moe_edge.evaluate.multiple_choice import Continuation, score_continuations
from moe_edge.evaluate.perplexity import measure_perplexity
from moe_edge.evaluate.stepwise import (
    Forced,
    Stepwise,
    score_batches,
    score_forced,
    score_in_turn,
    step_continuations,
)
from tests.support.tiny_models import GQA, random_prompts, random_weights, score_all

ROWS = 3  # of every batch: one shape


@pytest.fixture(scope="module")
def engine():
    return ResidentEngine(random_weights(GQA))


def close_to_prefill(run, engine, rows):
    """Gate B: |difference| <= 1e-5 of the scale; likeliest tokens where decided."""
    ids = [row.ids for row in rows]
    parts = [
        (ids[n : n + ROWS] + ROWS * [[1]])[:ROWS] for n in range(0, len(ids), ROWS)
    ]
    logits = [each for part in parts for each in score_all(engine, part)][: len(ids)]
    for row, log_probs, best, expected_SV in zip(
        rows, run.log_probs, run.best, logits, strict=True
    ):
        before_NV = expected_SV[row.first - 1 : -1].astype(np.float64)
        forced = np.asarray(row.ids[row.first :])
        norm_N = np.log(np.exp(before_NV).sum(axis=1))
        expected_N = before_NV[np.arange(len(forced)), forced] - norm_N
        np.testing.assert_allclose(log_probs, expected_N, atol=2e-5)
        assert best.dtype == np.int32
        top2_N2 = np.sort(before_NV, axis=1)[:, -2:]
        sure_N = top2_N2[:, 1] - top2_N2[:, 0] > 1e-4
        assert sure_N.any()
        assert (best == before_NV.argmax(axis=1))[sure_N].all()


def test_score_forced_unequal_rows_equal_prefill(engine):
    prompts = random_prompts(GQA, [16, 9, 2], seed=1)
    firsts = (6, 8, 1)
    rows = [Forced(ids, first) for ids, first in zip(prompts, firsts, strict=True)]
    run = score_forced(engine, rows)
    assert [len(row) for row in run.log_probs] == [10, 1, 1]
    close_to_prefill(run, engine, rows)
    assert run.steps == 10 and run.step_s[0] > 0 and run.bytes_moved == 0


def test_engines_take_turns_and_score_as_alone(engine, monkeypatch):
    other, order = engine.at_k(1), []
    for number, one in enumerate((engine, other)):
        decode = one.decode
        monkeypatch.setattr(
            one, "decode", lambda *a, n=number, d=decode: order.append(n) or d(*a)
        )
    prompts = random_prompts(GQA, [4] * 4, seed=2)
    rows = [Forced(ids, 3) for ids in prompts]
    both = score_in_turn([engine, other], rows, 2)
    assert order == [0, 1, 1, 0]  # each row ends with its only decode step
    for one, run in zip((engine, other), both, strict=True):
        alone = score_batches(one, rows, 2)
        np.testing.assert_array_equal(run.log_probs, alone.log_probs)
        assert run.steps == alone.steps == len(run.step_s)


def test_score_forced_predicts_every_token_by_a_decode_step(engine, monkeypatch):
    seen = []
    prefill, decode = engine.prefill, engine.decode
    monkeypatch.setattr(
        engine,
        "prefill",
        lambda s, p, *a: seen.append([len(x) for x in p]) or prefill(s, p, *a),
    )

    def spy(session, tokens_B, active_B, *rest):
        seen.append((np.asarray(tokens_B).tolist(), np.asarray(active_B).tolist()))
        return decode(session, tokens_B, active_B, *rest)

    monkeypatch.setattr(engine, "decode", spy)
    rows = [Forced([1, 2, 3, 4, 5, 6], 4), Forced([7, 8, 9], 2), Forced([5], 1)]
    score_forced(engine, rows)
    # Both rows end with the last step; the second decodes no prompt of its own.
    assert seen[0] == [3, 1, 1]
    steps = seen[1:]
    assert [tokens[0] for tokens, _ in steps] == [4, 5]
    assert [tokens[1] for tokens, active in steps if active[1]] == [8]
    assert not any(active[2] for _, active in steps)


def test_score_forced_needs_no_more_room_than_the_longest_row(engine):
    # Prompt 60 with 4 forced tokens beside prompt 1 with 40: 100 tokens if the rows
    # began together.
    rows = [
        Forced([*range(60), 1, 2, 3, 4], 60),
        Forced([3] * 41, 1),
        Forced([5, 6], 1),
    ]
    close_to_prefill(score_forced(engine, rows), engine, rows)


def test_score_batches_keeps_order_and_fills_up(engine):
    rows = [Forced(ids, 3) for ids in random_prompts(GQA, [9, 12, 7, 5], 2)]
    run = score_batches(engine, rows, ROWS)
    assert [len(row) for row in run.log_probs] == [6, 9, 4, 2]
    close_to_prefill(run, engine, rows)
    assert run.steps == 9 + 2


def test_step_continuations_equal_prefill_scores(engine):
    items = [
        Continuation(ids, first, False)
        for ids, first in zip(
            random_prompts(GQA, [8, 15, 11, 5], seed=3), (5, 9, 10, 1), strict=True
        )
    ]
    ours = step_continuations(engine, items, ROWS)
    np.testing.assert_allclose(
        ours, score_continuations(engine, items, ROWS), rtol=1e-5
    )


def test_stepwise_perplexity_and_log_probs_equal_prefill(engine):
    rows = random_prompts(GQA, [11, 4, 1], seed=4)
    np.testing.assert_allclose(
        token_log_probs(Stepwise(engine), rows),
        token_log_probs(engine, rows),
        atol=2e-5,
    )
    ids = random_prompts(GQA, [50], seed=5)[0]
    given = {"window": 16, "stride": 8, "batch_size": ROWS}
    ours = measure_perplexity(Stepwise(engine), ids, **given)
    theirs = measure_perplexity(engine, ids, **given)
    assert ours.tokens == theirs.tokens == 49
    assert ours.nll == pytest.approx(theirs.nll, rel=1e-5)


@pytest.mark.parametrize(
    "row, message",
    [
        (Forced([1, 2], 0), "row 0 forces tokens from 0 on; expected 1"),
        (Forced([], 1), "prompt 0 is empty"),
        (Forced([1, 61], 1), "token id 61, expected 0..60"),
    ],
)
def test_score_forced_refuses_bad_rows(engine, row, message):
    with pytest.raises(RequestError, match=message):
        score_forced(engine, [row])


def test_score_forced_refuses_rows_beyond_the_context(engine):
    with pytest.raises(CapacityError, match="2049 tokens .* context of 2048"):
        score_forced(engine, [Forced([1] * 2049, 2045)])

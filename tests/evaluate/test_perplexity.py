import math

import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, ConfigError, RequestError
from moe_edge.evaluate.perplexity import (
    Perplexity,
    Window,
    default_window,
    measure_perplexity,
    plan_windows,
)
from tests.support.table_engine import TableEngine


def random_ids(count, seed=1):
    return np.random.default_rng(seed).integers(0, 11, count).tolist()


def test_plan_windows_half_stride_golden():
    # The last window reaches the end; only new tokens are scored.
    assert plan_windows(10, 4, 2) == [
        Window(0, 1, 4),
        Window(2, 4, 6),
        Window(4, 6, 8),
        Window(6, 8, 10),
    ]


def test_plan_windows_without_overlap_never_scores_a_first_token():
    assert plan_windows(9, 4, 4) == [Window(0, 1, 4), Window(4, 5, 8)]


def test_plan_windows_text_shorter_than_window_is_one_window():
    assert plan_windows(3, 8, 4) == [Window(0, 1, 3)]


@pytest.mark.parametrize("stride", [1, 3, 6, 7])
@pytest.mark.parametrize("num_tokens", [2, 7, 8, 20, 29])
def test_plan_windows_holds_each_token_scored_once(num_tokens, stride):
    windows = plan_windows(num_tokens, 7, stride)
    scored = [t for part in windows for t in range(part.scored, part.end)]
    assert len(scored) == len(set(scored))
    skipped = set(range(num_tokens)) - set(scored)
    # With an overlap only the text's first token is left out.
    assert skipped == ({0} if stride < 7 else {b for b in range(0, num_tokens, 7)})


@pytest.mark.parametrize("window, stride", [(12, 6), (12, 12), (5, 1), (40, 20)])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_measure_perplexity_matches_reference(window, stride, batch_size):
    engine, ids = TableEngine(), random_ids(53)
    result = measure_perplexity(
        engine, ids, window=window, stride=stride, batch_size=batch_size
    )
    nll, tokens, seen = 0.0, 0, 0
    for start in range(0, 53, stride):
        end = min(start + window, 53)
        for t in range(max(seen, start + 1), end):
            nll -= engine.log_prob(ids[t - 1], ids[t])
            tokens += 1
        seen = end
        if end == 53:
            break
    assert result.tokens == tokens
    assert result.value == pytest.approx(math.exp(nll / tokens), rel=1e-6)


def test_measure_perplexity_batches_share_one_shape():
    engine = TableEngine()
    measure_perplexity(engine, random_ids(53), window=12, stride=6, batch_size=3)
    assert len(set(engine.shapes)) == 1


def test_measure_perplexity_defaults_half_the_window():
    result = measure_perplexity(TableEngine(max_positions=20), random_ids(50))
    assert (result.window, result.stride) == (20, 10)
    assert default_window(100_000) == 512


def test_measure_perplexity_rejects_window_beyond_context():
    with pytest.raises(CapacityError, match="window of 65 tokens .* context of 64"):
        measure_perplexity(TableEngine(), random_ids(80), window=65)


def test_plan_windows_rejects_stride_beyond_window():
    with pytest.raises(ConfigError, match="1..window=8, got 9"):
        plan_windows(20, 8, 9)


def test_plan_windows_rejects_window_of_one_token():
    with pytest.raises(ConfigError, match="at least 2 tokens, got 1"):
        plan_windows(20, 1, 1)


def test_plan_windows_rejects_text_of_one_token():
    with pytest.raises(RequestError, match="has 1 tokens"):
        plan_windows(1, 8, 4)


def test_perplexity_too_large_for_float_is_infinite():
    assert Perplexity(nll=1e6, tokens=1, window=2, stride=1).value == math.inf


def test_measure_perplexity_says_how_far_it_is(progress_clock, capsys):
    class Slow(TableEngine):
        def score(self, *args):
            progress_clock.passes(10)
            return super().score(*args)

    measure_perplexity(Slow(), random_ids(30), window=10, stride=10, batch_size=1)
    assert "batches of windows: 1/3, 20 s" in capsys.readouterr().err

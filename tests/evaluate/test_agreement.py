import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.evaluate.agreement import (
    BLOCK,
    RuleTally,
    bootstrap_mean,
    bootstrap_ratio,
    compare,
)
from moe_edge.evaluate.stepwise import ForcedRun


def run_of(log_probs, best):
    rows = [np.asarray(row, np.float32) for row in log_probs]
    return ForcedRun(rows, [np.asarray(row, np.int32) for row in best], 1, [1.0], 0)


def test_compare_counts_tokens_and_nats():
    reference = run_of([[-1.0, -2.0], [-3.0]], [[1, 2], [3]])
    run = run_of([[-1.5, -2.0], [-2.8]], [[1, 7], [3]])
    found = compare(run, reference)
    assert found.tokens == 3
    assert found.agreement == pytest.approx(2 / 3)
    # Lost: 0.5, 0 and -0.2 nats.
    assert found.perplexity_ratio == pytest.approx(np.exp(0.1))
    assert found.moved_nats == pytest.approx(0.7 / 3)
    assert found.perplexity == pytest.approx(np.exp(6.3 / 3))
    low, high = found.agreement_interval95
    assert low < 2 / 3 < high


def test_compare_with_itself_is_exactly_one():
    rng = np.random.default_rng(0)
    run = run_of(-rng.random((3, 50)), rng.integers(0, 9, (3, 50)))
    found = compare(run, run)
    assert found.agreement == found.perplexity_ratio == 1.0
    assert found.ratio_interval95 == (1.0, 1.0) and found.moved_nats == 0


@pytest.mark.parametrize("lengths", [([2], [3]), ([], []), ([0], [0])])
def test_compare_refuses_other_rows(lengths):
    runs = [run_of([[-1.0] * n for n in part], [[0] * n for n in part])
            for part in lengths]  # fmt: skip
    with pytest.raises(ConfigError, match="cannot be compared"):
        compare(*runs)


def test_bootstrap_blocks_see_that_neighbours_depend():
    # Blocks of equal numbers: as uncertain as one number a block, not one a token.
    rng = np.random.default_rng(1)
    values_N = rng.standard_normal(60)
    rows = [np.repeat(values_N, BLOCK)]
    low, high = bootstrap_mean(rows)
    assert low < values_N.mean() < high
    expected = 2 * 1.96 * values_N.std() / np.sqrt(60)
    assert high - low == pytest.approx(expected, rel=0.15)
    assert bootstrap_ratio(rows) == pytest.approx(tuple(np.exp([low, high])))


def test_weight_rules_best_is_the_closest_not_the_lowest_perplexity():
    rng = np.random.default_rng(2)
    truth = rng.uniform(-4, -1, 640)
    reference = run_of([truth], [np.zeros(640)])
    near = truth + rng.normal(0, 0.05, 640)  # noise around the model's own
    better = truth + np.abs(rng.normal(0, 0.3, 640))  # far, to the good
    tally = RuleTally()
    assert tally.verdict() is None
    for a in (0.1, 0.2):
        for rule, log_probs in (("own", near), ("replaced", better)):
            run = run_of([log_probs], [np.zeros(640)])
            card = vars(compare(run, reference))
            card |= {"a": a, "weights": rule, "renormalise": rule == "own"}
            tally.add(card, run, reference)
    verdict = tally.verdict()
    assert verdict["best"] == "own, renormalised" and verdict["clear"]
    rules = verdict["rules"]
    assert rules["replaced"]["perplexity_ratio"] < 0.9
    assert rules["replaced"]["settings"] == 2
    gap = rules["replaced"]["moved_nats"] - rules["own, renormalised"]["moved_nats"]
    low, high = verdict["second_minus_best_interval95"]
    assert low < gap < high

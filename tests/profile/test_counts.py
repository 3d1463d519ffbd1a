"""Counts against a loop over tokens."""

import numpy as np

from moe_edge.profile.counts import coactivation, count_rows, domain_counts


def random_ids(tokens=9000, experts=5, top_k=3):
    rng = np.random.default_rng(0)
    return np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k]


def test_coactivation_counts_tokens_that_chose_both():
    ids = random_ids()  # more than two blocks
    both = coactivation(ids, 6)
    chose = [set(np.flatnonzero((ids == e).any(axis=1))) for e in range(6)]
    assert both.dtype == np.int64
    assert both.tolist() == [[len(a & b) for b in chose] for a in chose]
    assert both[0, 1] and not both[5].any()


def test_domain_counts_and_rows_follow_the_domain_of_each_token():
    ids, domain = random_ids(50), np.repeat([1, 0, 1], [10, 25, 15])
    counts = domain_counts(ids, domain, 3, 6)
    for d in range(3):
        for e in range(6):
            assert counts[d, e] == (ids[domain == d] == e).sum()
    rows = count_rows("m", ("a", "b", "c"), domain, 4, 3, counts)
    assert [row["tokens"] for row in rows] == [25, 25, 0]
    assert rows[1] == {
        "model": "m",
        "domain": "b",
        "layer": 4,
        "num_experts": 6,
        "top_k": 3,
        "tokens": 25,
        "counts": counts[1].tolist(),
    }
    assert sum(rows[1]["counts"]) == 25 * 3

import jax
import numpy as np
import pytest

from moe_edge.kernels import rows
from moe_edge.model import router
from moe_edge.model.config import MoeConfig
from moe_edge.model.router import keep_best_groups
from tests.support.slow_cases import slow

LOGITS = np.random.default_rng(0).standard_normal((7, 12)).astype(np.float32)


@pytest.fixture(params=["XLA", "one kernel"])
def choose(request, monkeypatch):
    """`router.choose` of either way, compiled."""
    if request.param == "one kernel":
        monkeypatch.setattr(rows, "are_wanted", lambda: True)
    return jax.jit(
        lambda *given, **more: router.choose(*given, **more), static_argnums=1
    )


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rule(**kwargs) -> MoeConfig:
    return MoeConfig(num_experts=12, top_k=3, expert_dim=8, **kwargs)


@pytest.mark.parametrize("normalised", [False, True])
def test_softmax_rule_matches_numpy(choose, normalised):
    got = choose(LOGITS, rule(norm_topk=normalised, routed_scaling=2.5))
    probs = softmax(LOGITS)
    ids = np.argsort(-probs, axis=-1)[:, :3]
    weights = np.take_along_axis(probs, ids, -1)
    if normalised:
        weights = weights / weights.sum(-1, keepdims=True)
    np.testing.assert_array_equal(got.ids_TK, ids)
    np.testing.assert_allclose(got.weights_TK, 2.5 * weights, rtol=1e-5)
    np.testing.assert_allclose(got.scores_TE, probs, rtol=1e-5)


def test_softmax_topk_rule_normalises_over_the_chosen(choose):
    got = choose(LOGITS, rule(scoring="softmax_topk"))
    ids = np.argsort(-LOGITS, axis=-1)[:, :3]
    chosen = np.take_along_axis(LOGITS, ids, -1)
    np.testing.assert_array_equal(got.ids_TK, ids)
    np.testing.assert_allclose(got.weights_TK, softmax(chosen), rtol=1e-5)


def _sparsemixer(scores_E, nearness: float, k: int):
    """Round by round, as Phi-3.5-MoE is published."""
    ids, weights, left_E = [], [], scores_E.astype(np.float64)
    for _ in range(k):
        best = left_E.max()
        is_far_E = (best - scores_E) / np.maximum(abs(scores_E), best) > 2 * nearness
        parts_E = np.where(is_far_E, 0.0, np.exp(left_E - best))
        ids.append(int(left_E.argmax()))
        weights.append(parts_E[ids[-1]] / parts_E.sum())
        left_E[ids[-1]] = -np.inf
    return ids, weights


@pytest.mark.parametrize("nearness", [0.01, 0.3])
def test_sparsemixer_rule_matches_its_rounds(choose, nearness):
    got = choose(LOGITS, rule(scoring="sparsemixer", nearness=nearness))
    found = [_sparsemixer(row, nearness, 3) for row in LOGITS]
    np.testing.assert_array_equal(got.ids_TK, [ids for ids, _ in found])
    weights_TK = np.array([weights for _, weights in found])
    np.testing.assert_allclose(got.weights_TK, weights_TK, rtol=1e-5)
    np.testing.assert_allclose(got.scores_TE, softmax(LOGITS), rtol=1e-5)
    # One expert is chosen surely, another shares its weight.
    assert (weights_TK == 1).any() and (weights_TK < 0.9).any()


def test_sparsemixer_counts_equal_sub_experts_as_their_parent(choose):
    parents = choose(LOGITS, rule(scoring="sparsemixer", nearness=0.3))
    split = MoeConfig(
        num_experts=24,
        top_k=6,
        expert_dim=4,
        sub_experts=2,
        parent_top_k=3,
        scoring="sparsemixer",
        nearness=0.3,
    )
    got = choose(np.repeat(LOGITS, 2, axis=1), split)
    np.testing.assert_array_equal(np.asarray(got.ids_TK)[:, ::2] // 2, parents.ids_TK)
    halves_TK = np.repeat(np.asarray(parents.weights_TK) / 2, 2, axis=1)
    np.testing.assert_allclose(got.weights_TK, halves_TK, rtol=1e-6)


def _numpy(routing):
    return map(np.asarray, (routing.scores_TE, routing.weights_TK, routing.ids_TK))


@pytest.mark.parametrize(
    "options",
    [
        {"norm_topk": True, "routed_scaling": 2.5},
        *slow({"scoring": "sigmoid"}, {"scoring": "softmax_topk"}),
        {"scoring": "sparsemixer", "nearness": 0.3},
    ],
)
def test_k_of_a_token_is_data(choose, options):
    k_T = np.array([1, 3, 2, 2, 3, 0, 2], np.int32)  # 0: padding
    _, weights_TK, ids_TK = _numpy(choose(LOGITS, rule(**options), k_T=k_T))
    assert (ids_TK[k_T == 0] == 12).all() and not weights_TK[k_T == 0].any()
    for k in (1, 2, 3):
        alone = MoeConfig(num_experts=12, top_k=k, expert_dim=8, **options)
        _, want_TK, want_ids_TK = _numpy(choose(LOGITS, alone))
        has_k_T = k_T == k
        np.testing.assert_array_equal(ids_TK[has_k_T, :k], want_ids_TK[has_k_T])
        np.testing.assert_allclose(weights_TK[has_k_T, :k], want_TK[has_k_T], rtol=1e-6)
        assert (ids_TK[has_k_T, k:] == 12).all()
        assert not weights_TK[has_k_T, k:].any()


def test_a_scale_of_the_input_leaves_the_outputs_weight_one(choose):
    """The largest logit is chosen, also of scores that round to 1."""
    one = MoeConfig(
        num_experts=12, top_k=1, expert_dim=8, scoring="sigmoid", input_scaled=True
    )
    logits = LOGITS.copy()
    logits[0, 3], logits[0, 8] = 40.0, 41.0
    k_T = np.array([1] * 6 + [0], np.int32)
    got = choose(logits, one, k_T=k_T)
    np.testing.assert_array_equal(got.ids_TK[:-1, 0], logits[:-1].argmax(-1))
    np.testing.assert_array_equal(got.weights_TK[:, 0], k_T)
    assert got.ids_TK[-1, 0] == 12
    np.testing.assert_allclose(got.scores_TE, 1 / (1 + np.exp(-logits)), rtol=1e-6)


def test_correction_bias_changes_choice_not_weight(choose):
    correction = np.zeros(12, np.float32)
    correction[5] = 10.0
    got = choose(
        LOGITS,
        rule(scoring="sigmoid", correction_bias=True),
        correction,
    )
    np.testing.assert_array_equal(np.asarray(got.ids_TK)[:, 0], 5)
    sigmoid = 1 / (1 + np.exp(-LOGITS))
    np.testing.assert_allclose(
        np.asarray(got.weights_TK)[:, 0], sigmoid[:, 5], rtol=1e-5
    )


@pytest.mark.parametrize("group_score", ["max", "top2"])
def test_group_limit_matches_numpy_loop(group_score):
    moe = rule(num_groups=4, topk_groups=2, group_score=group_score)
    got = np.asarray(jax.jit(keep_best_groups, static_argnums=1)(LOGITS, moe))
    for row, kept in zip(LOGITS, got, strict=True):
        groups = np.sort(row.reshape(4, 3), axis=-1)
        score = groups[:, -1] if group_score == "max" else groups[:, -2:].sum(-1)
        best = set(np.argsort(-score)[:2])
        expected = [row[e] if e // 3 in best else -np.inf for e in range(12)]
        np.testing.assert_array_equal(kept, np.asarray(expected, np.float32))


def test_ties_go_to_the_lower_id(choose):
    got = choose(np.zeros((2, 12), np.float32), rule())
    np.testing.assert_array_equal(got.ids_TK, [[0, 1, 2]] * 2)


def test_a_state_that_is_no_number_still_names_experts(choose):
    logits_TE = LOGITS.copy()
    logits_TE[2] = np.nan
    logits_TE[3, 7] = np.nan
    got = choose(logits_TE, rule(scoring="softmax_topk"))
    assert (np.asarray(got.ids_TK) < 12).all() and np.asarray(got.ids_TK)[3, 0] == 7
    assert not np.isfinite(np.asarray(got.weights_TK)[2:4]).any()


def test_negative_corrections_leave_places_beyond_the_last_expert_alone(choose):
    correction_E = np.linspace(-3, -2, 12, dtype=np.float32)
    got = choose(LOGITS, rule(scoring="sigmoid", correction_bias=True), correction_E)
    values_TE = 1 / (1 + np.exp(-LOGITS)) + correction_E
    want_TK = np.argsort(-values_TE, axis=-1)[:, :3]
    np.testing.assert_array_equal(got.ids_TK, want_TK)

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moe_edge.convert.refactored_router import Judges, gate_tensors
from moe_edge.model.config import MoeConfig
from moe_edge.model.proxy_gate import GateNeurons, block_levels, pattern_counts
from moe_edge.model.record import RecordLayout
from moe_edge.papers.moe_prism.refactor.gates.linear import order_subs, sub_norms
from moe_edge.papers.moe_prism.refactor.gates.proxy import (
    RankShares,
    central_neurons,
    choose_judges,
    coactivation,
    fit_judges,
    stack_judges,
)

T, F, U = 400, 16, 4
# The authors' counts of sub-experts by rank: 16 of 8 experts of 4.
PAPER_PATTERN = (4, 4, 4, 3, 1, 0, 0, 0)


def sample(seed=0):
    """Activations whose sub-experts fire together, each led by one neuron."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(F) % U)
    drive_TU = rng.gamma(1.0, 1.0, (T, U))
    noise = rng.gamma(1.0, 1.0, (T, F))
    leader = np.array([np.flatnonzero(labels == u)[u % 4] for u in range(U)])
    activations = 0.5 * drive_TU[:, labels] * noise
    activations[:, leader] = 2 * drive_TU
    signs = rng.choice([-1, 1], (T, F))
    return (activations * signs).astype(np.float32), labels, leader


def test_coactivation_counts_pairs_of_the_most_active():
    activations = np.array([[3, -2, 1, 0], [0, 5, -6, 0.5]], np.float32)
    expected = [[1, 1, 1, 0], [1, 2, 2, 1], [1, 2, 2, 1], [0, 1, 1, 1]]
    np.testing.assert_array_equal(coactivation(activations), expected)


def test_central_neurons_by_hand():
    """Centrality by the definition, one neuron at a time."""
    activations, labels, _ = sample()
    together = coactivation(activations)
    got = central_neurons(activations, labels, U, 2)
    for u in range(U):
        members = np.flatnonzero(labels == u)
        value = [sum(together[i, j] for j in members if j != i) for i in members]
        best = members[np.argsort(-np.array(value), kind="stable")[:2]]
        np.testing.assert_array_equal(got[u], best)


def test_fitted_neurons_find_the_leaders():
    activations, labels, leader = sample()
    norms = sub_norms(activations, labels, U)
    ids, scale, prior = fit_judges(activations, norms, labels, 1)
    np.testing.assert_array_equal(ids[:, 0], leader)
    judges = choose_judges(activations, norms, labels, 1)
    errors = norms - judges.levels(activations)
    assert abs(errors.mean()) < 0.01 * norms.mean()  # unbiased
    assert errors.std() < 0.5 * norms.std(axis=0).mean()
    # The paper's choice has neither factor nor prior.
    central = choose_judges(activations, norms, labels, 1, "central")
    assert (central.scale_Ur == 1).all() and not central.prior_U.any()
    assert (scale > 0).all()


def test_all_neurons_predict_the_norm_exactly():
    activations, labels, _ = sample()
    weights = np.random.default_rng(1).random(F).astype(np.float32)
    norms = sub_norms(activations, labels, U, weights)
    judges = choose_judges(activations, norms, labels, F // U)
    np.testing.assert_allclose(judges.levels(activations), norms, rtol=1e-3, atol=1e-3)
    assert sorted(judges.neurons_Ur.ravel()) == list(range(F))


def test_dead_and_equal_neurons_do_no_harm():
    activations, labels, _ = sample()
    activations[:, labels == 0] = 0.0
    twins = np.flatnonzero(labels == 1)
    activations[:, twins] = activations[:, twins[:1]]
    norms = sub_norms(activations, labels, U)
    judges = choose_judges(activations, norms, labels, 3)
    assert all(np.isfinite(array).all() for array in judges)
    assert len(set(judges.neurons_Ur[0])) == 3
    assert not judges.levels(activations)[:, 0].any()
    np.testing.assert_allclose(
        judges.levels(activations)[:, 1], norms[:, 1], rtol=1e-2, atol=1e-2
    )


def test_rank_shares_are_means_of_what_placed_blocks_add():
    shares = RankShares(top_k=2, subs=2)
    levels = np.array([[1.0, 2.0], [5.0, 1.0], [1.0, 2.0]])
    norms = np.array([[1.0, 3.0], [4.0, 2.0], [8.0, 6.0]])
    weights = np.array([0.5, 0.5, 0.25])
    shares.add(np.array([0, 0, 1]), weights, levels, norms, each=2.0)
    # Rank 0: (3, 1) and (4, 2) at 0.5; rank 1: (6, 8) at 0.25, made falling.
    table = np.array([[1.75, 0.75], [1.5, 1.5]])
    np.testing.assert_allclose(shares.table(), table / table.sum())


def test_every_k_has_a_pattern_and_the_papers_is_one():
    rng = np.random.default_rng(0)
    shares = RankShares(8, 4)
    for rank in range(8):
        norms = rng.gamma(0.4, 1.0, (200, 4))
        weights = np.full(200, 0.6**rank)
        shares.add(np.full(200, rank), weights, norms, norms)
    moe = {"num_experts": 64 * 4, "expert_dim": 8, "sub_experts": 4, "parent_top_k": 8}

    def counts(table, k):
        gate = {"gate": "proxy_pattern", "gate_neurons": 1}
        return pattern_counts(MoeConfig(top_k=k, rank_shares=table, **moe, **gate))

    before = np.zeros(8, int)
    for k in range(1, 33):
        found = np.array(counts(shares.table(), k))
        assert found.sum() == k and found.max() <= 4
        assert (found >= before).all()  # one block more at each K
        assert (np.diff(found) <= 0).all()
        before = found
    paper = tuple(
        tuple(1.0 if place < count else 0.1 - 0.01 * place for place in range(4))
        for count in PAPER_PATTERN
    )
    assert counts(paper, 16) == PAPER_PATTERN


def test_gate_tensors_are_rows_of_the_parents():
    layout = RecordLayout(d_model=5, expert_dim=F, has_bias=True)
    rng = np.random.default_rng(0)
    records = rng.standard_normal((2, layout.size)).astype(ml_dtypes.bfloat16)
    experts = [
        Judges(
            rng.permutation(F)[: U * 2].reshape(U, 2),
            rng.random((U, 2)).astype(np.float32),
            rng.random(U).astype(np.float32),
        )
        for _ in range(2)
    ]
    tensors = gate_tensors(records, layout, stack_judges(experts))
    assert tensors["router.proxy_up"].shape == (2 * U * 2, 5)
    assert tensors["router.proxy_prior"].shape == (2 * U,)
    row = (1 * U + 3) * 2 + 1  # expert 1, block 3, second gate neuron
    neuron = experts[1].neurons_Ur[3, 1]
    for name in ("gate", "up", "gate_bias", "up_bias"):
        expected = layout.part(records[1], name)[neuron]
        got = tensors[f"router.proxy_{name}"][row]
        assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()
    assert tensors["router.proxy_scale"][row] == experts[1].scale_Ur[3, 1]


def test_the_model_judges_as_the_fit_did():
    """`block_levels` on hidden states = `Judges.levels` on their activations."""
    layout, E = RecordLayout(d_model=5, expert_dim=F), 2
    rng = np.random.default_rng(0)
    records = rng.standard_normal((E, layout.size)).astype(np.float32)
    x_TD = rng.standard_normal((7, 5)).astype(np.float32)
    experts, expected = [], []
    for record in records:
        gate, up = (x_TD @ layout.part(record, name).T for name in ("gate", "up"))
        activations = gate / (1 + np.exp(-gate)) * up
        ids = rng.permutation(F)[: U * 2].reshape(U, 2)
        prior = rng.normal(size=U).astype(np.float32)  # some levels would be negative
        experts.append(Judges(ids, rng.random((U, 2)).astype(np.float32), prior))
        expected.append(experts[-1].levels(activations))
    tensors = gate_tensors(records, layout, stack_judges(experts))
    arrays = {name.split(".")[1]: jnp.asarray(a) for name, a in tensors.items()}
    neurons = GateNeurons(
        *(arrays["proxy_gate"], arrays["proxy_up"], None, None),
        *(arrays["proxy_scale"], arrays["proxy_prior"]),
    )
    moe = MoeConfig(
        num_experts=E * U,
        top_k=1,
        expert_dim=F // U,
        sub_experts=U,
        parent_top_k=E,
        gate="proxy_global",
        gate_neurons=2,
    )
    parents = jnp.tile(jnp.arange(E, dtype=jnp.int32)[None], (7, 1))
    levels = block_levels(jnp.asarray(x_TD), parents, neurons, moe)
    np.testing.assert_allclose(levels, np.stack(expected, axis=1), atol=1e-4)
    assert (np.asarray(levels) == 0).any()


def test_order_puts_the_most_important_first():
    activations = np.array([[4, 1, 1, 1], [4, 1, 1, 1], [0, 9, 0, 0]], np.float32)
    labels = np.array([0, 1, 2, 2])
    tokens = np.array([1.0, 1.0, 0.1])

    def order(rule, down=(1, 1, 1, 1)):
        return order_subs(
            labels,
            activations,
            3,
            down_norms_F=np.array(down),
            token_weights_T=tokens,
            rule=rule,
        ).tolist()

    assert order("output") == [0, 2, 1, 1]  # 8, 2.9, 4
    assert order("activation") == [1, 0, 2, 2]  # 8, 11, 4
    assert order("usage") == [0, 1, 2, 2]  # first in 2, 1, 0 tokens
    assert order("output", (0.1, 1, 1, 1)) == [2, 1, 0, 0]

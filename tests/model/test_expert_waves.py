"""A layer in waves has the bits of the layer at once."""

import numpy as np
import pytest

from moe_edge.engine.programs import jit_step
from moe_edge.model.expert_waves import ExpertWaves
from moe_edge.model.experts import run_experts
from moe_edge.model.record import RecordLayout
from tests.support.tiny_models import GQA

E, K = GQA.moe.num_experts, GQA.moe.top_k


@pytest.mark.parametrize(
    "method, tokens, has_bias, room",
    # Of 300 tokens some blocks have MANY_TOKENS, some few.
    [("pairs", 5, True, 2), ("blocks", 40, False, 5), ("blocks", 300, True, 5)],
)
def test_waves_equal_all_experts_at_once(method, tokens, has_bias, room):
    rng = np.random.default_rng(0)
    layout = RecordLayout(GQA.d_model, GQA.moe.expert_dim, has_bias)
    records_ER = rng.standard_normal((E, layout.size), np.float32)
    x_TD = rng.standard_normal((tokens, GQA.d_model), np.float32)
    weights_TK = rng.random((tokens, K), np.float32)
    scores_TE = rng.random((tokens, E))
    scores_TE[:, 7] -= 0.5  # chosen more than the others
    ids_TK = np.argsort(scores_TE, axis=1)[:, :K].astype(np.int32)
    ids_TK[-2:] = E  # padding
    whole = jit_step(lambda *a: run_experts(*a, layout, method=method))
    expected = whole(x_TD, ids_TK, weights_TK, records_ER)

    waves = ExpertWaves(layout, E, method)
    run = jit_step(waves.run)
    carry = jit_step(waves.start)(x_TD, ids_TK)
    ids_P = ids_TK.reshape(-1)
    if method == "pairs":  # in order, `room` pairs a wave
        parts = [np.arange(i, min(i + room, ids_P.size)) for i in range(0, 15, room)]
    else:  # experts in any order
        parts = np.array_split(rng.permutation(E), -(-E // room))
    for part in parts:
        if method == "pairs":
            slot_of = np.full(ids_P.shape, room, np.int32)
            held = ids_P[part]
            slot_of[part] = np.where(held < E, np.arange(len(part)), room)
            slot_of = slot_of.reshape(ids_TK.shape)
        else:
            held, slot_of = part, np.full(E, room, np.int32)
            slot_of[part] = np.arange(len(part))
        slots_SR = np.full((room, layout.size), np.nan, np.float32)
        slots_SR[: len(held)] = records_ER[np.minimum(held, E - 1)]
        carry = run(carry, x_TD, ids_TK, weights_TK, slots_SR, slot_of)
    got = jit_step(waves.finish)(carry, ids_TK, weights_TK)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))

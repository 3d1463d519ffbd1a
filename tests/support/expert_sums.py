"""What the routed experts add, pair by pair in NumPy."""

import numpy as np

E, K = 9, 3  # of `make_case`


def make_case(layout, tokens, dtype, seed=0):
    """(x_TD, ids_TK, weights_TK, experts_ER), random."""
    random = np.random.default_rng(seed)
    x_TD = random.normal(size=(tokens, layout.d_model)).astype(np.float32)
    # E means "no expert"; E - 1 is chosen by nobody.
    ids_TK = [random.permutation([*range(E - 1), E])[:K] for _ in range(tokens)]
    weights_TK = random.random((tokens, K)).astype(np.float32)
    experts_ER = 0.2 * random.normal(size=(E, layout.size))
    return x_TD, np.array(ids_TK, np.int32), weights_TK, experts_ER.astype(dtype)


def experts_of_several_rows() -> np.ndarray:
    """int32 `[8, K]`: experts with 8, 5, 4, 3, 2 and 1 rows; once E, no expert."""
    slot_TK = np.full((8, K), E, np.int32)
    slot_TK[:, 0] = 0
    slot_TK[:5, 1], slot_TK[5:, 1] = 1, 2
    slot_TK[:4, 2], slot_TK[4:6, 2], slot_TK[6, 2] = 3, 4, 5
    return slot_TK


def rows_beside_each_alone(run, x_TD, experts_ER) -> np.ndarray:
    """Rows `[8, K, D]` of `run(x_TD, slot_TK, experts_ER)` for experts of several
    rows; raises AssertionError unless each row has the bits that it has alone."""
    slot_TK = experts_of_several_rows()
    rows_TKD = np.asarray(run(x_TD, slot_TK, experts_ER)).reshape(*slot_TK.shape, -1)
    for t in range(len(slot_TK)):
        alone_KD = np.asarray(run(x_TD[t : t + 1], slot_TK[t : t + 1], experts_ER))
        np.testing.assert_array_equal(rows_TKD[t], alone_KD)
    return rows_TKD


def half_in_slots(ids_TK, host_ER, empty):
    """(slots_SR, slot_TK, host_TK): expert e belongs into slot e + 1, S = E + 2.

    The odd ones are there, all other slots are `empty`; host_TK is -1 where a pair's
    expert is there or where there is none.
    """
    S = E + 2
    slots_SR = np.full((S, host_ER.shape[1]), empty).astype(host_ER.dtype)
    slots_SR[2 : E + 1 : 2] = host_ER[1:E:2]
    slot_TK = np.where(ids_TK < E, ids_TK + 1, S).astype(np.int32)
    absent_TK = (ids_TK % 2 == 0) & (ids_TK < E)
    return slots_SR, slot_TK, np.where(absent_TK, ids_TK, -1).astype(np.int32)


def expected(case, layout) -> np.ndarray:
    """What `make_case`'s experts add."""
    x_TD, ids_TK, weights_TK, experts_ER = case
    weights_TK = np.where(ids_TK < E, weights_TK, 0)
    ids_TK = np.minimum(ids_TK, E - 1)
    return numpy_sum((x_TD, ids_TK, weights_TK, experts_ER.astype(np.float32)), layout)


def numpy_sum(case, layout) -> np.ndarray:
    """The experts' weighted sum with SiLU, float64 `[T, D]`.

    Args:
      case: (x_TD, ids_TK, weights_TK, experts_ER); an id of E is padding.
    """
    x_TD, ids_TK, weights_TK, experts_ER = map(np.asarray, case)
    want_TD = np.zeros(x_TD.shape)
    for t, k in np.argwhere(ids_TK < len(experts_ER)):
        part = {
            name: np.asarray(layout.part(experts_ER[ids_TK[t, k]], name), np.float64)
            for name in layout.shapes
        }
        gate = part["gate"] @ x_TD[t] + part.get("gate_bias", 0)
        up = part["up"] @ x_TD[t] + part.get("up_bias", 0)
        out = part["down"] @ (gate / (1 + np.exp(-gate)) * up)
        want_TD[t] += float(weights_TK[t, k]) * (out + part.get("down_bias", 0))
    return want_TD

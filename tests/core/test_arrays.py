import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.core.arrays import add_at, count_at, module_of, set_at, take_rows


def test_module_of_host_device_and_tracer():
    assert module_of(np.zeros(2)) is np
    assert module_of(jnp.zeros(2)) is jnp
    seen = []
    jax.jit(lambda x: seen.append(module_of(x)) or x)(jnp.zeros(2))
    assert seen == [jnp]


def test_set_and_count_at_agree_and_count_duplicates():
    index = np.array([[1, 2], [1, -1]])
    for xp in (np, jnp):
        counted = count_at(xp.zeros(4, dtype=np.int32), index)
        assert counted.tolist() == [0, 2, 1, 1]
        assert set_at(counted, index, 7).tolist() == [0, 7, 7, 7]


def test_add_at_adds_to_a_row():
    for xp in (np, jnp):
        added = add_at(xp.ones((2, 2), dtype=np.float32), 1, xp.full(2, np.float32(3)))
        assert added.tolist() == [[1, 1], [4, 4]]


def test_take_rows_is_take_along_axis_in_numpy_and_jax():
    array_TN = np.arange(12, dtype=np.float32).reshape(3, 4)
    index_TK = np.array([[3, 0], [1, 1], [0, 2]], np.int32)
    want_TK = np.take_along_axis(array_TN, index_TK, axis=1)
    found_TK = take_rows(array_TN, index_TK)
    assert isinstance(found_TK, np.ndarray)
    np.testing.assert_array_equal(found_TK, want_TK)
    in_jit = jax.jit(take_rows)(array_TN, index_TK)
    np.testing.assert_array_equal(in_jit, want_TK)

"""One text for NumPy and jax.numpy: what policies need on the host and in jit."""

import numpy as np


def module_of(array):
    """numpy or jax.numpy, whichever the array (or tracer) belongs to."""
    return array.__array_namespace__()


def take_rows(array_TN, index_TK):
    """array[t, index[t, k]]: `take_along_axis`, of which NumPy's own takes four times
    as long for a few rows."""
    if isinstance(array_TN, np.ndarray):
        return array_TN[np.arange(len(index_TK))[:, None], index_TK]
    return module_of(array_TN).take_along_axis(array_TN, index_TK, axis=1)


def set_at(array, index, value):
    """array with `value` at `index`; a NumPy array is changed in place (donated)."""
    if isinstance(array, np.ndarray):
        array[index] = value
        return array
    return array.at[index].set(value)


def count_at(array, index):
    """array plus one for every occurrence in `index`; NumPy: in place (donated)."""
    if isinstance(array, np.ndarray):
        np.add.at(array, index, 1)
        return array
    return array.at[index].add(1)


def add_at(array, index, value):
    """array plus `value` at an index that names no place twice; NumPy: in place."""
    if isinstance(array, np.ndarray):
        array[index] += value
        return array
    return array.at[index].add(value)

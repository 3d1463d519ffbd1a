"""The thread count of NumPy's products inside and after the block."""

import pytest

from moe_edge.refactor.partition import blas_threads


def test_one_blas_thread_nests_and_restores():
    functions = blas_threads._openblas()
    if functions is None:
        pytest.skip("this NumPy does not bring OpenBLAS along")
    read, write = functions
    before = read()
    write(2)
    try:
        with blas_threads.one_blas_thread() as outer:
            assert outer and read() == 1
            with blas_threads.one_blas_thread():
                assert read() == 1
            assert read() == 1
        assert read() == 2
        with pytest.raises(KeyError), blas_threads.one_blas_thread():
            raise KeyError
        assert read() == 2
    finally:
        write(before)


def test_one_blas_thread_without_openblas_says_so(monkeypatch):
    monkeypatch.setattr(blas_threads, "_openblas", lambda: None)
    with blas_threads.one_blas_thread() as done:
        assert done is False

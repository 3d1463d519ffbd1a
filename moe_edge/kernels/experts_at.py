"""Experts in host memory by the host kernels, called from NumPy without a program."""

import array
import ctypes
import functools
import threading
from collections.abc import Sequence

import numpy as np

from moe_edge.core.checks import ConfigError, check_shape
from moe_edge.kernels import native

DTYPES = (*native.KINDS, "uint8")  # of records
_INT32 = np.dtype(np.int32)
_AT_ONCE = 32  # tokens whose outputs are allocated together


class _Kept(ctypes.Structure):
    """`KeptExperts` of native/kernels.cc."""

    _fields_ = (
        *(("each", ctypes.c_void_p), ("limit", ctypes.c_float)),
        *((name, ctypes.c_int32) for name in ("E", "D", "F", "has_bias")),
        *((name, ctypes.c_int32) for name in ("activation", "kind", "int8")),
    )


class _Room:
    """Arguments and outputs of one shape, whose addresses are known.

    NumPy takes longer to say an address than to copy a token.
    """

    def __init__(self, T: int, K: int, D: int):
        self.x_TD = np.empty((T, D), np.float32)
        self.ids_TK = np.empty((T, K), np.int32)
        self.weights_TK = np.empty((T, K), np.float32)
        arrays = self.x_TD, self.ids_TK, self.weights_TK
        self.given = (*(each.ctypes.data for each in arrays), T, K)
        self._outputs: list[tuple[np.ndarray, int]] = []

    def output(self) -> tuple[np.ndarray, int]:
        """An array `[T, D]` that nobody had before, and its address."""
        if not self._outputs:
            T, D = self.x_TD.shape
            some = np.empty((_AT_ONCE // max(1, T) or 1, T, D), np.float32)
            first, size = some.ctypes.data, some.strides[0]
            self._outputs = [(y, first + n * size) for n, y in enumerate(some)]
        return self._outputs.pop()


class _Rooms(threading.local):
    """A thread's, by shape."""

    def __init__(self):
        self.of = functools.lru_cache(maxsize=64)(_Room)


_rooms = _Rooms()


class ExpertsAt:
    """Experts whose records stand anywhere in host memory, computed without a program.

    What does not change from call to call is checked and laid out once: a call costs
    a few microseconds and what it computes.

    Args:
      records: `[R]` each, of one dtype; read in place, so valid as long as this is.
      layout: of the records.
      activation, limit: as of `model.experts.run_experts`.
    Raises:
      ConfigError: records that do not fit, or no kernels.
    """

    def __init__(
        self,
        records: Sequence[np.ndarray],
        layout,
        activation: str,
        limit: float | None,
    ):
        if (library := native.library()) is None:
            raise ConfigError(
                "experts are to be computed on the host, and the host kernels were not "
                "built; run pip install -e . again with a C++ compiler"
            )
        for record_R in records:
            check_shape("record", record_R, (layout.size,))
            if record_R.dtype != records[0].dtype or not record_R.flags.c_contiguous:
                raise ConfigError("records must be contiguous and of one dtype")
            layout.check_dtype(record_R.dtype)
            if record_R.dtype.name not in DTYPES:
                known = ", ".join(DTYPES)
                raise ConfigError(
                    f"records are {record_R.dtype}, expected one of {known}"
                )
        addresses = (record_R.ctypes.data for record_R in records)
        self._each = (ctypes.c_void_p * len(records))(*addresses)
        self._records, self._d_model = list(records), layout.d_model
        dtype = records[0].dtype.name if records else "float32"
        self._kept = _Kept(
            *(ctypes.addressof(self._each), limit or 0.0),
            *(len(records), layout.d_model, layout.expert_dim, layout.has_bias),
            native.ACTIVATIONS.index(activation),
            native.BLOCK_KINDS[layout.kind] or native.KINDS[dtype],
            layout.int8,
        )
        self._address = ctypes.addressof(self._kept)
        self._run = library.moe_edge_experts_at

    def __call__(
        self,
        x_TD: np.ndarray,
        ids_TK: np.ndarray,
        weights_TK: np.ndarray,
        taken: Sequence[int] | None = None,
    ) -> np.ndarray:
        """The weighted sum of each token's experts.

        Args:
          x_TD: float32.
          ids_TK: int32, numbers of records; as many as there are or more: no expert.
          weights_TK: float32.
          taken: those that count, whatever else is chosen; None: all.
        Returns:
          float32 `[T, D]`, with the bits of `native.experts` where all are in one
          array.
        Raises:
          ConfigError: shapes or dtypes that do not fit.
        """
        (T, K), D = ids_TK.shape, self._d_model
        if x_TD.shape != (T, D) or weights_TK.shape != (T, K):
            check_shape("x_TD", x_TD, (T, D))
            check_shape("weights_TK", weights_TK, (T, K))
        if ids_TK.dtype != _INT32:
            raise ConfigError(f"ids_TK is {ids_TK.dtype}, expected int32")
        if not self._records or (taken is not None and not len(taken)):
            return np.zeros((T, D), np.float32)
        room = _rooms.of(T, K, D)
        room.x_TD[:], room.ids_TK[:], room.weights_TK[:] = x_TD, ids_TK, weights_TK
        y_TD, address = room.output()
        some: tuple[int | None, int] = (None, 0)
        if taken is not None:
            ids = array.array("i", taken)
            some = ids.buffer_info()
        wrong = self._run(self._address, *room.given, *some, address)
        if wrong is not None:
            raise ConfigError(f"experts: {wrong.decode()}")
        return y_TD

"""Experts in host memory by the host kernels, called from NumPy without a program."""

import ctypes
from collections.abc import Sequence

import numpy as np

from moe_edge.core.checks import ConfigError, check_shape
from moe_edge.kernels import native

DTYPES = (*native.KINDS, "uint8")  # of records


class ExpertsAt:
    """Experts whose records stand anywhere in host memory, computed without a program.

    What does not change from call to call is checked and laid out once: a call costs
    a few microseconds and what it computes.

    Args:
      records: `[R]` each, of one dtype; read in place, so valid as long as this is.
      layout: of the records.
      activation, limit: as of `model.experts.run_experts`.
    Raises:
      ConfigError: records that do not fit.
    """

    def __init__(
        self,
        records: Sequence[np.ndarray],
        layout,
        activation: str,
        limit: float | None,
    ):
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
        self._constant = (
            *(len(records), layout.d_model, layout.expert_dim, layout.has_bias),
            native.ACTIVATIONS.index(activation),
            limit or 0.0,
            native.BLOCK_KINDS[layout.kind] or native.KINDS[dtype],
            layout.int8,
        )

    def __call__(
        self, x_TD: np.ndarray, ids_TK: np.ndarray, weights_TK: np.ndarray
    ) -> np.ndarray:
        """The weighted sum of each token's experts.

        Args:
          x_TD: float32.
          ids_TK: int32, numbers of records; as many as there are or more: no expert.
          weights_TK: float32.
        Returns:
          float32 `[T, D]`, with the bits of `native.experts` where all are in one
          array.
        Raises:
          ConfigError: shapes or dtypes that do not fit.
        """
        (T, K), D = ids_TK.shape, self._d_model
        x_TD = np.ascontiguousarray(x_TD, np.float32)
        ids_TK = np.ascontiguousarray(ids_TK)
        weights_TK = np.ascontiguousarray(weights_TK, np.float32)
        if x_TD.shape != (T, D) or weights_TK.shape != (T, K):
            check_shape("x_TD", x_TD, (T, D))
            check_shape("weights_TK", weights_TK, (T, K))
        if ids_TK.dtype != np.int32:
            raise ConfigError(f"ids_TK is {ids_TK.dtype}, expected int32")
        y_TD = np.zeros((T, D), np.float32)
        if not self._records:
            return y_TD
        wrong = native.library().moe_edge_experts_at(
            *(x_TD.ctypes.data, ids_TK.ctypes.data, weights_TK.ctypes.data),
            ctypes.addressof(self._each),
            *(y_TD.ctypes.data, T, K),
            *self._constant,
        )
        if wrong is not None:
            raise ConfigError(f"experts: {wrong.decode()}")
        return y_TD

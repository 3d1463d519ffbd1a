"""CPU assist: absent experts are computed on the host while others travel.

Which ones a rule says (`assist_base.py`); costs are measured, never assumed. The host
computes with the same kernels as the device (`model/experts.py`). On a CPU-only machine
"host" and "device" are the same cores, and XLA:CPU runs one program at a time: there
the assist is correct but saves only the transfer: it does not run while the device
works.
"""

import collections
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moe_edge.core.checks import ConfigError, check_count
from moe_edge.kernels import native
from moe_edge.kernels.experts_at import DTYPES, ExpertsAt
from moe_edge.model.config import ModelConfig
from moe_edge.model.experts import choose_method, run_experts
from moe_edge.model.record import RecordLayout


class MeasuredCost:
    """Mean of the last measurements (SMoE, section V.A); before them, `start_s`."""

    def __init__(self, last: int, start_s: float):
        check_count("measurements of a cost", last)
        if not (math.isfinite(start_s) and start_s > 0):
            raise ConfigError(
                f"start value of a cost is {start_s} s, expected a finite number above "
                "0; measure one call first"
            )
        self._start_s = start_s
        self._measured_s = collections.deque(maxlen=last)

    def add(self, seconds: float) -> None:
        """Takes one measurement."""
        self._measured_s.append(seconds)

    @property
    def mean_s(self) -> float:
        if not self._measured_s:
            return self._start_s
        return sum(self._measured_s) / len(self._measured_s)


def host_array(array: np.ndarray) -> jax.Array:
    """An array for the CPU backend; bfloat16 as its bits, as CPU kernels want it.

    Shares memory with `array` where JAX can (64-byte-aligned data), else copies: the
    caller must not write to it while the result lives.
    """
    if array.dtype == ml_dtypes.bfloat16:
        array = array.view(np.uint16)
    return jax.device_put(array, jax.devices("cpu")[0])


@functools.cache
def _program(config: ModelConfig):
    moe, layout = config.moe, RecordLayout.of(config)

    def run(record_R, x_TD, weights_T, chosen_T):
        return run_experts(
            x_TD,
            jnp.where(chosen_T, 0, 1).astype(jnp.int32)[:, None],  # 1: no expert
            weights_T[:, None],
            record_R[None],
            layout,
            activation=moe.activation,
            swiglu_limit=moe.swiglu_limit,
            # Not left to `run_experts`, which looks at the default backend.
            method=choose_method(x_TD.shape[0], record_R.dtype, "cpu"),
        )

    # A program for the CPU on every machine.
    return jax.jit(run, compiler_options={"xla_cpu_prefer_vector_width": 512})


class HostExperts:
    """A layer's experts as the host computes them; no record is copied.

    One call of the host kernels; without them one program a record: few are absent.

    Args:
      config: the model.
      records: of all experts of the layer, in host memory, valid as long as this is.
    """

    def __init__(self, config: ModelConfig, records: Sequence[np.ndarray]):
        self._config, self._records, self._kernel = config, records, None
        moe, layout = config.moe, RecordLayout.of(config)
        if native.choice() == "native" and records[0].dtype.name in DTYPES:
            limits = moe.activation, moe.swiglu_limit
            self._kernel = ExpertsAt(records, layout, *limits)

    def outputs(
        self,
        experts: Sequence[int],
        x_TD: jax.Array | np.ndarray,
        ids_TK: np.ndarray,
        weights_TK: np.ndarray,
    ) -> np.ndarray:
        """The part of the layer's weighted sum that the host computes.

        Args:
          experts: ids of the experts that the host computes.
          x_TD: float32, anywhere.
          ids_TK: int32, chosen experts; those not in `experts` are left out.
          weights_TK: float32.
        Returns:
          float32 `[T, D]`.
        """
        if not len(experts):
            return np.zeros(x_TD.shape, np.float32)
        if self._kernel is not None and len(ids_TK) <= native.MAX_ROWS:
            return self._kernel(np.asarray(x_TD), ids_TK, weights_TK, experts)
        experts = np.asarray(experts)
        is_it_NTK = np.asarray(ids_TK)[None] == experts[:, None, None]
        weights_NT = np.where(is_it_NTK, np.asarray(weights_TK)[None], 0).sum(axis=2)
        arrays = zip(experts, weights_NT, is_it_NTK.any(axis=2), strict=True)
        x_TD = jax.device_put(x_TD, jax.devices("cpu")[0])
        parts = [
            _program(self._config)(
                host_array(self._records[expert]),
                *(x_TD, host_array(weights_T), host_array(chosen_T)),
            )
            for expert, weights_T, chosen_T in arrays
        ]
        return np.asarray(functools.reduce(jnp.add, parts))

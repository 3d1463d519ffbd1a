"""Experts that the host computes while a device's program goes on: START and WAIT.

START puts states and a list of experts into pinned memory, has the host's cores compute
them where their records lie, and brings the rows back, all on a stream of its own
(native/assist_calls.h). WAIT lets the program's stream go on behind that. Neither waits
on the host. The host's part is a function that the driver calls in the stream's order:
so the stream's event comes behind it, and no thread polls a flag.

On a CPU the same code runs over records of streams and events, and what was started is
computed at WAIT, not before.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.kernels import native, side_calls


class UnderWay(NamedTuple):
    """What START has begun, until WAIT; no other code may change it."""

    rows_PD: jax.Array
    ids_TK: jax.Array
    x_TD: jax.Array


@functools.cache
def open_calls() -> None:
    """Makes START and WAIT known to JAX, and on a GPU opens its driver.

    Raises:
      ConfigError: the C++ kernels were not built or are not chosen, or no driver.
    """
    library = side_calls.register("assist", "CPU assist inside programs")
    if native.choice() != "native":
        raise ConfigError(
            "CPU assist inside programs computes with the C++ kernels, and "
            "MOE_EDGE_KERNELS is xla; leave one of them out"
        )
    if jax.local_devices()[0].platform != "gpu":
        return
    library.moe_edge_assist_open.restype = ctypes.c_char_p
    wrong = library.moe_edge_assist_open()
    if wrong is not None:
        raise ConfigError(f"CUDA's driver does not open: {wrong.decode()}")


def start(
    ids_TK: jax.Array,
    x_TD: jax.Array,
    host_ER: jax.Array,
    layout,
    activation: str,
    limit: float | None,
    others: Sequence[jax.Array] = (),
) -> tuple[UnderWay, list[jax.Array]]:
    """Begins to compute experts on the host.

    Args:
      ids_TK: int32, records of `host_ER`; E and above: none.
      x_TD: float32.
      host_ER: records in the host's memory, of a dtype of the host kernels.
      layout: of the records, a `RecordLayout`.
      activation, limit: as of `model.experts.run_experts`.
      others: what is to be used after this.
    Returns:
      (what `wait` takes; the others).
    """
    rows = jax.ShapeDtypeStruct((ids_TK.size, x_TD.shape[1]), jnp.float32)
    numbers = (
        *(layout.expert_dim, layout.has_bias, native.ACTIVATIONS.index(activation)),
        *(native.BLOCK_KINDS[layout.kind], layout.int8),
    )
    rows_PD, *others = side_calls.call(
        "moe_edge_assist_start",
        (ids_TK, x_TD, host_ER, *others),
        read=(0, 1, 2),
        new=[rows],
        layout=np.array(numbers, np.int64),
        limit=np.float32(limit or 0.0),
    )
    return UnderWay(rows_PD, ids_TK, x_TD), others


def wait(
    under_way: UnderWay, others: Sequence[jax.Array] = ()
) -> tuple[jax.Array, list[jax.Array]]:
    """The rows, once the host has computed them.

    Args:
      others: what was computed before, and is used after this.
    Returns:
      (float32 `[T * K, D]`, token by token in order of rank, zeros where nothing was
      asked for; the others).
    """
    given = *under_way, *others
    rows_PD, *others = side_calls.call("moe_edge_assist_wait", given, read=(1, 2))
    return rows_PD, others

"""Records on their way into slots while a program goes on: START and WAIT.

XLA orders a copy where it likes, and on a GPU puts no product between its begin and its
end. These two calls (native/prefetch_calls.h) stay where data put them. START has a few
blocks of a kernel copy the records of a plan from the host's pinned memory into slots,
on a stream of its own. WAIT lets the program's stream go on behind them. Neither waits
on the host.

On a CPU the same code and kernel run over records of streams and events, and what was
started is copied at WAIT, not before: a program that reads too early computes with what
was there.

Between the two calls nobody else may use the plan, or the slots that it fills. Both are
passed through in place, so what takes the slots from WAIT comes after it. Who reads
other slots meanwhile takes what START gave, and is passed through WAIT.
"""

import functools
from collections.abc import Sequence

import jax

from moe_edge.kernels import side_calls

NONE = -1  # an entry of a plan that copies nothing


@functools.cache
def open_calls() -> None:
    """Makes START and WAIT known to JAX, and on a GPU loads their kernel.

    Raises:
      ConfigError: the C++ kernels were not built, or no kernel can be had for this GPU.
    """
    library = side_calls.register("prefetch", "the prefetch inside programs")
    side_calls.load_cuda(library, "prefetch")


def start(
    plan_2P: jax.Array,
    slots_SR: jax.Array,
    host_ER: jax.Array,
    others: Sequence[jax.Array] = (),
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Begins to copy records into slots.

    Args:
      plan_2P: int32, of each entry the record (`NONE`: no entry), then its slot; no
        slot twice.
      slots_SR: records of this program alone, donated.
      host_ER: records in the host's memory, of the same dtype and width.
      others: what is to be used after this.
    Returns:
      (the plan, for `wait` alone; the slots, see above; the others).
    """
    given = plan_2P, slots_SR, host_ER, *others
    plan_2P, slots_SR, *others = side_calls.call(
        "moe_edge_prefetch_start", given, read=(2,)
    )
    return plan_2P, slots_SR, others


def wait(
    plan_2P: jax.Array, slots_SR: jax.Array, others: Sequence[jax.Array] = ()
) -> tuple[jax.Array, list[jax.Array]]:
    """The slots, once what `start` began has arrived.

    Args:
      plan_2P, slots_SR: of `start`.
      others: what was computed before, and is used after this.
    Returns:
      (the slots; the others).
    """
    given = plan_2P, slots_SR, *others
    slots_SR, *others = side_calls.call("moe_edge_prefetch_wait", given, read=(0,))
    return slots_SR, others

"""Joins `jax.distributed`, which no other transport needs.

Recoverability is on, so that a process that dies later ends nobody else; but the end of
process 0 still aborts all others.
"""

import jax

HEARTBEAT_S = 10  # the lost are noticed faster, by the transport `messages`


def join_jax(coordinator: str, processes: int, process: int, timeout_s: float) -> None:
    """Makes this process one of several; all call it at about the same time.

    Args:
      coordinator: HOST:PORT at which process 0 listens.
    """
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(
        coordinator,
        num_processes=processes,
        process_id=process,
        initialization_timeout=max(int(timeout_s), 1),
        heartbeat_timeout_seconds=HEARTBEAT_S,
    )
    jax.local_devices()  # every backend waits for those of all processes
